"""Grammars vetted in a process of their own, before any rank compiles them."""
