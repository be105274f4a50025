"""What goes wrong between ranks, whichever way they talk: one shape for the errors of groups and of links.

Both have ``fault``, ``rank``, ``group``, ``operation``, ``step`` and ``sequence``. They are two classes, since tensor
and pipeline parallelism do not know of each other.
"""

from __future__ import annotations

from pp.link import LinkError
from tp.group import CollectiveError

CommError = CollectiveError | LinkError
COMM_ERRORS = (CollectiveError, LinkError)


def is_consequence(error: BaseException) -> bool:
    """Returns whether an error says no more than that contact was lost, which another rank may be the cause of."""
    return isinstance(error, COMM_ERRORS) and error.fault == "backend"
