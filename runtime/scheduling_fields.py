"""The fields of a request that say how it is scheduled, checked at the door."""

from __future__ import annotations

from collections.abc import Mapping

from sampler.shown_value import shown

SCHEDULING_FIELDS = ("priority", "cache_salt")
_MAX_PRIORITY = 2**31 - 1
_MAX_SALT_CHARACTERS = 1024


class SchedulingFieldError(ValueError):
    """Such a field is not acceptable: the client's fault.

    Args:
        param: The field.
        message: Field, value and allowed range.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def priority_of(fields: Mapping[str, object]) -> int:
    """Returns a request's priority; 0 when it has none.

    Raises:
        SchedulingFieldError: It is no integer or too large.
    """
    value = fields.get("priority")
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) > _MAX_PRIORITY:
        allowed = f"an integer in {-_MAX_PRIORITY}..{_MAX_PRIORITY}, lower = sooner,"
        raise SchedulingFieldError("priority", f"priority is {shown(value)}: {allowed} is needed")
    return value


def cache_salt_of(fields: Mapping[str, object]) -> str:
    """Returns what a request's KV entries are shared under; an empty text when it does not say.

    Raises:
        SchedulingFieldError: It is no text, empty or too long.
    """
    value = fields.get("cache_salt")
    if value is None:
        return ""
    if not isinstance(value, str) or not 1 <= len(value) <= _MAX_SALT_CHARACTERS:
        allowed = f"a string of 1..{_MAX_SALT_CHARACTERS} characters"
        raise SchedulingFieldError("cache_salt", f"cache_salt is {shown(value)}: {allowed} is needed")
    return value
