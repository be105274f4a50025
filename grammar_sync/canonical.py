"""One form for schemas that say the same: what order means nothing is put in order.

Kept is the order of properties, of enumerated values and of alternatives; so is every value itself.
"""

from __future__ import annotations

from typing import Any, Final

_BY_NAME: Final = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_LISTS: Final = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SCHEMAS: Final = frozenset(
    {
        "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties",
    }
)  # fmt: skip


def canonical_schema(schema: Any) -> Any:
    """Returns a schema with its keywords, the names under ``type`` and declared names under ``required`` in order.

    ``schema`` is not nested deeper than the interpreter's stack allows.
    """
    if not isinstance(schema, dict):
        return schema
    return {keyword: _keyword(keyword, schema[keyword], schema) for keyword in sorted(schema)}


def _keyword(keyword: str, value: Any, schema: dict[str, Any]) -> Any:
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: canonical_schema(item) for name, item in value.items()}
    if keyword in _LISTS and isinstance(value, list):
        return [canonical_schema(item) for item in value]
    if keyword in _SCHEMAS:
        return [canonical_schema(item) for item in value] if isinstance(value, list) else canonical_schema(value)
    if keyword == "type" and _are_names(value):
        return sorted(value)
    if keyword == "required" and _are_names(value):
        declared = schema.get("properties")
        # Names that are not declared come in the order in which they are required.
        if isinstance(declared, dict) and declared.keys() >= set(value):
            return sorted(value)
    return value


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)
