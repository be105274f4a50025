"""The command line: what may be said, as types, groups of options and commands."""
