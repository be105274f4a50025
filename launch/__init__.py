"""The outside of Lockstep: command line, process groups, starting and ending ranks.

The packages of this project have short names that others on PyPI share. A wrong one found first would fail far from
its cause, so the origin of each is checked here, before anything is imported from it.
"""

from importlib.util import find_spec
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent


def _check_origins() -> None:
    for name in ("runtime", "grammar_sync", "tp", "pp", "sampler"):
        spec = find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or origin.parent.parent != _ROOT:
            raise ImportError(
                f"package '{name}' comes from {origin or 'nowhere'}, not from {_ROOT / name}: "
                "uninstall the other package of that name, or put Lockstep first on the path"
            )


_check_origins()
