"""Grammars: compiled on the first stage, agreed by all its ranks, relayed down, turned into masks."""
