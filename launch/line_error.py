"""What is wrong with a line of a JSONL input that no engine sees: of ``sample`` and of ``check-grammar``."""

from __future__ import annotations

from runtime.messages import ErrorInfo


class LineError(ValueError):
    """A line asks for nothing that could be done.

    Args:
        message: One line naming the field, its value and what is allowed.
        param: The field at fault.
    """

    def __init__(self, message: str, param: str) -> None:
        super().__init__(message)
        self.info = ErrorInfo("invalid_request", message, param)
