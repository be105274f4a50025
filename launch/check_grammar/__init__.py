"""``lockstep check-grammar``: grammars compiled and tried without ranks."""
