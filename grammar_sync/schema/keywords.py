"""What becomes of each keyword of JSON Schema, as data: documents are made from it, and a test holds it to the code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

from grammar_sync.schema.arrays import MAX_COUNTED_STATES, MAX_DIFFERENT_ITEMS
from grammar_sync.schema.numbers import MAX_DIVISOR, SURE_DIGITS, SURE_DIVISOR
from grammar_sync.schema.objects import MAX_OVERLAPPING_PATTERNS


class Enforcement(NamedTuple):
    """How a keyword is enforced.

    Attributes:
        status: ``exact``: as JSON Schema has it. ``conditions``: the same under ``note``'s conditions, and else
            refused. ``annotation``: it says nothing about which values are valid.
        note: The conditions, or what is good to know.
        negated: Whether it can stand under ``not``, ``if`` or an overlapping ``oneOf``: ``yes``, ``no``, or when.
    """

    status: Literal["exact", "conditions", "annotation"]
    note: str = ""
    negated: str = "yes"


_NUMBERS: Final = (
    f"numbers with a bound are written without an exponent, and those with a point with at most {SURE_DIGITS} digits"
)

KEYWORDS: Final[Mapping[str, Enforcement]] = {
    "type": Enforcement("exact", "an integer is written without a point: 1, not 1.0"),
    "enum": Enforcement("exact", "values that the rest of the schema refuses are left out", "scalars, [] and {}"),
    "const": Enforcement("exact", "", "scalars, [] and {}"),
    "minimum": Enforcement("exact", _NUMBERS),
    "exclusiveMinimum": Enforcement("exact", "draft 4's form too"),
    "maximum": Enforcement("exact", _NUMBERS),
    "exclusiveMaximum": Enforcement("exact", "draft 4's form too"),
    "multipleOf": Enforcement(
        "conditions",
        f"of integers: up to {SURE_DIVISOR}, and to {MAX_DIVISOR} within bounds of a few digits or where the last "
        f"digits decide (256, 500, 512, 1000); of numbers with a point: halves to sixteenths, up to {SURE_DIVISOR} "
        "(0.25, 0.75, 2.5); tenths and others are not exact in binary floating point",
        "integers",
    ),
    "minLength": Enforcement("exact", "counts characters"),
    "maxLength": Enforcement("exact", "counts characters"),
    "pattern": Enforcement(
        "conditions",
        "any regular language, look-around included; a string must match by ECMA-262's rules and Python's; spelled as "
        "json.dumps does",
    ),
    "format": Enforcement(
        "conditions",
        "the names of the format table; a name that is not known passes, and the reply says so",
        "formats that are exact",
    ),
    "items": Enforcement("exact", "a list of schemas too (drafts up to 2019-09)", "without a prefix"),
    "prefixItems": Enforcement("exact"),
    "additionalItems": Enforcement("exact", "", "no"),
    "minItems": Enforcement("exact"),
    "maxItems": Enforcement("exact"),
    "uniqueItems": Enforcement(
        "conditions", f"arrays of at most one item, or whose items have at most {MAX_DIFFERENT_ITEMS} values", "no"
    ),
    "contains": Enforcement(
        "conditions", f"one at a place; items × matches up to {MAX_COUNTED_STATES}; not beside uniqueItems"
    ),
    "minContains": Enforcement("exact", "with contains"),
    "maxContains": Enforcement("exact", "with contains"),
    "properties": Enforcement("exact", "in the order in which they are declared"),
    "patternProperties": Enforcement(
        "conditions", f"at most {MAX_OVERLAPPING_PATTERNS} patterns in one object", "over declared names"
    ),
    "additionalProperties": Enforcement(
        "exact",
        "where properties are declared and nothing is said of others, others are left out, and the reply says so",
        "over declared names",
    ),
    "unevaluatedProperties": Enforcement("exact", "what other branches of an anyOf evaluate does not count", "no"),
    "unevaluatedItems": Enforcement("exact", "what contains evaluates does not count", "no"),
    "required": Enforcement("exact", "names that no schema declares come last"),
    "minProperties": Enforcement(
        "conditions", "up to the number of declared names, and one more where others are allowed: these may repeat"
    ),
    "maxProperties": Enforcement("exact"),
    "propertyNames": Enforcement("exact", "", "no"),
    "dependentRequired": Enforcement(
        "exact", "names that no schema declares come last, what is required before what requires it"
    ),
    "dependentSchemas": Enforcement("exact", "names that no schema declares come last"),
    "dependencies": Enforcement("exact", "in every draft; the order is that of the other two"),
    "$ref": Enforcement("exact", "within the document: pointers, anchors, identifiers"),
    "$dynamicRef": Enforcement("conditions", "where one place in the document can be meant"),
    "$recursiveRef": Enforcement("conditions", "where one place in the document can be meant"),
    "allOf": Enforcement("exact"),
    "anyOf": Enforcement("exact"),
    "oneOf": Enforcement("conditions", "branches that overlap must be able to be negated"),
    "not": Enforcement("conditions", "what is under it must be able to be negated"),
    "if": Enforcement("conditions", "what is under it must be able to be negated"),
    "then": Enforcement("exact", "with if"),
    "else": Enforcement("exact", "with if"),
    **dict.fromkeys(
        (
            "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$defs", "definitions", "$comment",
            "$vocabulary", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly",
            "contentEncoding", "contentMediaType", "contentSchema",
        ),
        Enforcement("annotation"),
    ),
}  # fmt: skip
"""By keyword; any other is an annotation, as JSON Schema has it."""
