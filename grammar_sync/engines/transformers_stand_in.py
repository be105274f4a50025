"""Leaves transformers out of the start of every rank and of every process that compiles grammars.

xgrammar imports it for a base class and for types of arguments that are never used here. It would take a quarter of
the CPU time that a node's ranks need to start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_NAME = "transformers"


class _StandIn(ModuleType):
    """Has a class of any name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def without_transformers() -> Iterator[None]:
    """Lets what is imported meanwhile import a stand-in, unless this process has imported transformers already."""
    if _NAME in sys.modules:
        yield
        return
    sys.modules[_NAME] = _StandIn(_NAME)
    try:
        yield
    finally:
        del sys.modules[_NAME]
