"""Validators that read draft 4's ``exclusiveMinimum: true`` in later drafts too, where OpenAPI 3.0 still writes it.

The jsonschema library would take true for the number 1 there, and judge wrongly without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

_LATER: Final = Draft202012Validator.VALIDATORS
_EXTEND: Final[Any] = extend  # it has no types


def reading_old_bounds(kind: Any) -> Any:
    """Returns a class of validators that reads both forms; the same class where it reads draft 4's alone."""
    if "exclusiveMinimum" not in kind.VALIDATORS:
        return kind
    return _EXTEND(kind, {"exclusiveMinimum": _exclusive_minimum, "exclusiveMaximum": _exclusive_maximum})


def _exclusive_minimum(validator: Any, bound: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(bound, bool):
        yield from _LATER["exclusiveMinimum"](validator, bound, instance, schema) or ()
    elif bound and validator.is_type(instance, "number") and "minimum" in schema and instance <= schema["minimum"]:
        yield ValidationError(f"{instance!r} is less than or equal to the minimum of {schema['minimum']!r}")


def _exclusive_maximum(validator: Any, bound: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(bound, bool):
        yield from _LATER["exclusiveMaximum"](validator, bound, instance, schema) or ()
    elif bound and validator.is_type(instance, "number") and "maximum" in schema and instance >= schema["maximum"]:
        yield ValidationError(f"{instance!r} is greater than or equal to the maximum of {schema['maximum']!r}")
