"""JSON Schemas as grammars of our own: taken apart, merged, and written as rules."""
