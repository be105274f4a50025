"""What the fork server imports, once, before it forks ranks and commands."""

from __future__ import annotations

import gc
from importlib import import_module

from grammar_sync.schema.strings import format_checker

_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "numpy",
    "launch.front.main",
    "launch.rank.main",
    "launch.serve.main",
    "launch.check_grammar.main",
    "launch.chaos.engine.front",
    "launch.chaos.script.worker",
    "engine_ranks",
    "forked_command",
)

gc.disable()
for _name in _MODULES:
    import_module(_name)
# What every process works out at its first JSON Schema, once.
format_checker()
# Ranks never search what is imported for garbage: that would take half of a short rank's time, and copy every page.
gc.freeze()
gc.enable()
