"""A process group that is made in Python, as torch.distributed's own functions take it."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


class PythonGroup(dist.ProcessGroup):
    """What torch wants of each such group; its operations are those of the class that derives from this.

    Args:
        rank: This rank within the group.
        size: How many ranks it has.
    """

    def __init__(self, rank: int, size: int) -> None:
        # torch's stub leaves out the form without a store, the only one that a class in Python can be made by.
        start: Any = super().__init__
        start(rank, size)

    @property
    def group_name(self) -> Any:
        """The name that torch knows the group by; the Python part of a group has none of its own."""
        return self._known_as

    def _set_group_name(self, name: Any) -> None:
        self._known_as = name
