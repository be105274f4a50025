"""The logit processors that a launch names, before any code of theirs is loaded. Importable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points

ENTRY_POINT_GROUP = "lockstep.logit_processors"


class ProcessorLoadError(ValueError):
    """A logit processor named at launch cannot be had: the fault of whoever launches."""


def named_processors(specs: Sequence[str] = ()) -> dict[str, str]:
    """Returns where the processors of installed packages and of a launch are, by the names they are registered under.

    Args:
        specs: ``module:name`` each; the processor is registered as ``name``.

    Raises:
        ProcessorLoadError: One is malformed, or two share a name.
    """
    sources = [(point.name, point.value) for point in entry_points(group=ENTRY_POINT_GROUP)]
    for spec in specs:
        module, _, name = spec.partition(":")
        if not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise ProcessorLoadError(f"logit processor {spec!r}: module:name is needed")
        sources.append((name, spec))
    found: dict[str, str] = {}
    for name, spec in sorted(sources):
        if name in found:
            raise ProcessorLoadError(f"logit processor {spec!r}: another processor is registered as {name!r}")
        found[name] = spec
    return found
