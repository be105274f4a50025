"""What all tests share."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling

ROOT = Path(__file__).resolve().parent.parent
_SERVED = "tests/distributed/served/"

# Before anything imports torch: several test processes share the cores, and an OpenMP barrier waits for every thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Nor is a thread that waits for the others to take a core from them.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# While test files are collected their imports are not searched for garbage; see pytest_collection_finish.
gc.disable()


def pytest_configure() -> None:
    """Lets the fork server that starts ranks import the project before it forks them."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "tests")))


class _FilesOfOneServer(LoadFileScheduling):  # type: ignore[misc] # xdist has no types
    """Sends a file to one worker, as its parent does; and all files that share a server to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return _SERVED if nodeid.startswith(_SERVED) else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Chooses which worker runs what, where files are to stay whole."""
    return _FilesOfOneServer(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first, the longest before the others, so that none of them is left for the end."""
    items.sort(key=_seconds, reverse=True)


def pytest_collection_finish() -> None:
    """Leaves what was imported out of every later search for garbage."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets the interpreter take apart what was imported."""
    gc.unfreeze()


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("long")
    return 0.0 if marker is None else float(marker.args[0])
