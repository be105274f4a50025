"""The grammar engines behind one protocol, and what each of them is given."""
