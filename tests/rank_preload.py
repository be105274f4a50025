"""What the fork server imports, once, before it forks ranks."""

from __future__ import annotations

import gc
from importlib import import_module

_MODULES = ("torch", "torch.distributed", "numpy", "launch.rank.groups", "runtime.assembly", "engine_ranks")

gc.disable()
for _name in _MODULES:
    import_module(_name)
# Ranks never search what is imported for garbage: that would take half of a short rank's time, and copy every page.
gc.freeze()
gc.enable()
