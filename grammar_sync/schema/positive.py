"""What a keyword asks of a valid value, as goals: one function a keyword, or a group that belongs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeAlias

from grammar_sync.schema.document import Conjunction, Document, Schema, pointer
from grammar_sync.schema.goals import (
    Check,
    Choice,
    Goal,
    Goals,
    Scopes,
    Update,
    among,
    arrays,
    at_least_characters,
    at_least_items,
    at_least_properties,
    at_most_characters,
    at_most_items,
    at_most_properties,
    forbidding,
    numbers,
    only,
    other_than,
    requiring,
    strings,
    with_contains,
    with_items,
    with_names,
    with_properties,
)
from grammar_sync.schema.state import (
    JSON_TYPES,
    Contains,
    ItemSet,
    JsonType,
    Numbers,
    PropertySet,
    State,
    TextConstraint,
)
from grammar_sync.schema.values import boolean, count, listing, mapping, name_list, names, number, text, wrong

ITEM_KEYWORDS: Final = ("prefixItems", "items", "additionalItems")
PROPERTY_KEYWORDS: Final = ("properties", "patternProperties", "additionalProperties")


class Context:
    """What the functions of this module and the next need beside the schema.

    Args:
        document: Where references are looked up.
        is_disjoint: Whether no value is surely valid under both of two schemas.
        known_format: Whether a format's name means something.
    """

    def __init__(
        self,
        document: Document,
        is_disjoint: Callable[[Schema, Schema], bool],
        known_format: Callable[[str], bool],
    ) -> None:
        self.document = document
        self.is_disjoint = is_disjoint
        self.known_format = known_format


Positive: TypeAlias = Callable[[Context, Schema, Check], Goals]


def inner(check: Check, schema: Schema, *, positive: bool = True) -> Check:
    """Returns the check of a schema that applies to the same value."""
    return Check(schema, positive, check.via | {check.schema}, check.scopes if positive else frozenset())


def inner_checks(context: Context, check: Check, keyword: str, *, positive: bool = True) -> tuple[Check, ...]:
    """Returns the checks of all schemas in a keyword's list."""
    schema = check.schema
    count_ = len(listing(schema, keyword))
    return tuple(
        inner(check, context.document.child(schema, keyword, index), positive=positive) for index in range(count_)
    )


def _types(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (Update(lambda state: _typed(state, type_names(schema))),)


def type_names(schema: Schema) -> frozenset[str]:
    """Returns the names under ``type``.

    Raises:
        CompileError: One is no type.
    """
    value = schema.get("type")
    given = [value] if isinstance(value, str) else value
    known = {*JSON_TYPES, "integer"}
    if not isinstance(given, list) or not given or not all(isinstance(name, str) and name in known for name in given):
        raise wrong(schema, "type", f"one or more of {', '.join(sorted(known))}")
    return frozenset(given)


def _typed(state: State, given: frozenset[str]) -> State:
    kept: list[JsonType] = [name for name in JSON_TYPES if name in given]
    if "integer" in given and "number" not in given:
        kept.append("number")
        state = integral(state, wanted=True)
    return state.only(*kept)


def integral(state: State, *, wanted: bool) -> State:
    """Returns the state with integers only, or none of them."""
    old = state.number
    if old is None:
        return state
    return replace(state, number=None if old.integral is (not wanted) else replace(old, integral=wanted))


def _enum(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (among(listing(schema, "enum")),)


def _const(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (among([schema.get("const")]),)


def lower_bounds(schema: Schema) -> list[tuple[Fraction, bool]]:
    """Returns the (bound, whether it is itself outside) that a schema sets from below."""
    return _bounds(schema, "minimum", "exclusiveMinimum")


def upper_bounds(schema: Schema) -> list[tuple[Fraction, bool]]:
    """Returns the (bound, whether it is itself outside) that a schema sets from above."""
    return _bounds(schema, "maximum", "exclusiveMaximum")


def _bounds(schema: Schema, closed: str, exclusive: str) -> list[tuple[Fraction, bool]]:
    found = []
    old_form = isinstance(schema.get(exclusive), bool)
    if schema.get(closed) is not None:
        found.append((number(schema, closed), old_form and schema.get(exclusive) is True))
    if schema.get(exclusive) is not None and not old_form:
        found.append((number(schema, exclusive), True))
    return found


def _lower(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return tuple(numbers(_above(value, is_open)) for value, is_open in lower_bounds(schema))


def _upper(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return tuple(numbers(_below(value, is_open)) for value, is_open in upper_bounds(schema))


def _above(value: Fraction, is_open: bool) -> Callable[[Numbers], Numbers]:
    return lambda old: old.above(value, is_open=is_open)


def _below(value: Fraction, is_open: bool) -> Callable[[Numbers], Numbers]:
    return lambda old: old.below(value, is_open=is_open)


def divisor(schema: Schema) -> Fraction:
    """Returns ``multipleOf``.

    Raises:
        CompileError: It is no number above 0.
    """
    value = number(schema, "multipleOf")
    if value <= 0:
        raise wrong(schema, "multipleOf", "a number above 0")
    return value


def _multiple_of(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    value = divisor(schema)
    return (numbers(lambda old: replace(old, multiples=(*old.multiples, value))),)


def _min_length(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (at_least_characters(count(schema, "minLength")),)


def _max_length(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (at_most_characters(count(schema, "maxLength")),)


def _pattern(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    constraint = TextConstraint("pattern", text(schema, "pattern"), positive=True, path=pointer(schema.path, "pattern"))
    return (strings(lambda old: replace(old, constraints=(*old.constraints, constraint))),)


def _format(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    name = text(schema, "format")
    if not context.known_format(name):
        return ()
    constraint = TextConstraint("format", name, positive=True, path=pointer(schema.path, "format"))
    return (strings(lambda old: replace(old, constraints=(*old.constraints, constraint))),)


def _min_items(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (at_least_items(count(schema, "minItems")),)


def _max_items(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (at_most_items(count(schema, "maxItems")),)


def _unique_items(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    if not boolean(schema, "uniqueItems"):
        return ()
    return (arrays(lambda old: replace(old, unique_path=pointer(schema.path, "uniqueItems"))),)


def item_set(context: Context, schema: Schema, scopes: Scopes = frozenset()) -> ItemSet:
    """Returns what a schema says on items, in either form: prefixItems and items, or a list and additionalItems."""
    document = context.document
    prefix_keyword, rest_keyword = "prefixItems", "items"
    if isinstance(schema.get("items"), list):
        prefix_keyword, rest_keyword = "items", "additionalItems"
    prefix: tuple[Conjunction, ...] = ()
    if schema.get(prefix_keyword) is not None:
        size = len(listing(schema, prefix_keyword))
        prefix = tuple(((document.child(schema, prefix_keyword, index), True),) for index in range(size))
    rest: Conjunction | None = None
    if schema.get(rest_keyword) is not None:
        rest = ((document.child(schema, rest_keyword), True),)
    return ItemSet(prefix, rest, scopes)


def _items(context: Context, schema: Schema, check: Check) -> Goals:
    return (with_items(item_set(context, schema, check.scopes)),)


def contains_of(context: Context, schema: Schema) -> Contains:
    """Returns what ``contains`` counts and how often it must be there."""
    items = context.document.child(schema, "contains")
    counted = context.document.draft >= 2019
    least = count(schema, "minContains") if counted and schema.get("minContains") is not None else 1
    most = count(schema, "maxContains") if counted and schema.get("maxContains") is not None else None
    return Contains(((items, True),), (((items, False),),), least, most, pointer(schema.path, "contains"))


def _contains(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (with_contains(contains_of(context, schema)),)


def property_set(context: Context, schema: Schema, scopes: Scopes = frozenset()) -> PropertySet:
    """Returns what a schema says on properties."""
    document = context.document
    properties: dict[str, Conjunction] = {}
    if schema.get("properties") is not None:
        for name in mapping(schema, "properties"):
            properties[name] = ((document.child(schema, "properties", name), True),)
    patterns: list[tuple[str, Conjunction]] = []
    if schema.get("patternProperties") is not None:
        patterns = [
            (pattern, ((document.child(schema, "patternProperties", pattern), True),))
            for pattern in mapping(schema, "patternProperties")
        ]
    additional: Conjunction | None = None
    if schema.get("additionalProperties") is not None:
        additional = ((document.child(schema, "additionalProperties"), True),)
    return PropertySet(properties, tuple(patterns), additional, scopes, schema.path)


def _properties(context: Context, schema: Schema, check: Check) -> Goals:
    return (with_properties(property_set(context, schema, check.scopes)),)


def _required(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    if context.document.draft == 4 and isinstance(schema.get("required"), bool):
        return ()
    return (requiring(names(schema, "required")),)


def _min_properties(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (at_least_properties(count(schema, "minProperties"), pointer(schema.path, "minProperties")),)


def _max_properties(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (at_most_properties(count(schema, "maxProperties"), pointer(schema.path, "maxProperties")),)


def _property_names(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return (with_names(((context.document.child(schema, "propertyNames"), True),)),)


def dependents(context: Context, schema: Schema) -> list[tuple[str, str, tuple[str, ...] | Schema]]:
    """Returns (keyword, name, what it requires: names or a schema) of all three keywords of this kind."""
    found: list[tuple[str, str, tuple[str, ...] | Schema]] = []
    for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
        if schema.get(keyword) is None:
            continue
        for name, value in mapping(schema, keyword).items():
            needs_names = keyword == "dependentRequired" or (keyword == "dependencies" and isinstance(value, list))
            needed = name_list(schema, keyword, value) if needs_names else context.document.child(schema, keyword, name)
            found.append((keyword, name, needed))
    return found


def _dependents(context: Context, schema: Schema, check: Check) -> Goals:
    goals = []
    for keyword, name, needed in dependents(context, schema):
        if isinstance(needed, Schema):
            with_name: Goals = (only("object"), requiring([name]), inner(check, needed))
        else:
            # What is needed comes first, where no schema declares an order.
            with_name = (only("object"), requiring((*needed, name)))
        alternatives = ((other_than("object"),), (only("object"), forbidding(name)), with_name)
        goals.append(Choice(alternatives, pointer(schema.path, keyword, name)))
    return tuple(goals)


def _all_of(context: Context, schema: Schema, check: Check) -> Goals:  # noqa: ARG001
    return inner_checks(context, check, "allOf")


def _any_of(context: Context, schema: Schema, check: Check) -> Goals:
    checks = inner_checks(context, check, "anyOf")
    return (Choice(tuple((one,) for one in checks), pointer(schema.path, "anyOf")),)


def _one_of(context: Context, schema: Schema, check: Check) -> Goals:
    checks = inner_checks(context, check, "oneOf")
    alternatives: list[Goals] = []
    for index, one in enumerate(checks):
        others: list[Goal] = [
            inner(check, other.schema, positive=False)
            for place, other in enumerate(checks)
            if place != index and not context.is_disjoint(one.schema, other.schema)
        ]
        alternatives.append((one, *others))
    return (Choice(tuple(alternatives), pointer(schema.path, "oneOf")),)


def _not(context: Context, schema: Schema, check: Check) -> Goals:
    return (inner(check, context.document.child(schema, "not"), positive=False),)


def _if(context: Context, schema: Schema, check: Check) -> Goals:
    if schema.get("then") is None and schema.get("else") is None:
        return ()
    child = context.document.child
    condition = child(schema, "if")
    taken: list[Goal] = [inner(check, condition)]
    left: list[Goal] = [inner(check, condition, positive=False)]
    if schema.get("then") is not None:
        taken.append(inner(check, child(schema, "then")))
    if schema.get("else") is not None:
        left.append(inner(check, child(schema, "else")))
    return (Choice((tuple(taken), tuple(left)), pointer(schema.path, "if")),)


def referred(context: Context, schema: Schema) -> list[Schema]:
    """Returns the schemas that a schema refers to."""
    keywords = ("$ref", "$dynamicRef", "$recursiveRef")
    return [context.document.resolve(schema, keyword) for keyword in keywords if schema.get(keyword) is not None]


def _references(context: Context, schema: Schema, check: Check) -> Goals:
    return tuple(inner(check, target) for target in referred(context, schema))


POSITIVE: Final[Mapping[tuple[str, ...], Positive]] = {
    ("type",): _types,
    ("enum",): _enum,
    ("const",): _const,
    ("minimum", "exclusiveMinimum"): _lower,
    ("maximum", "exclusiveMaximum"): _upper,
    ("multipleOf",): _multiple_of,
    ("minLength",): _min_length,
    ("maxLength",): _max_length,
    ("pattern",): _pattern,
    ("format",): _format,
    ("minItems",): _min_items,
    ("maxItems",): _max_items,
    ("uniqueItems",): _unique_items,
    ITEM_KEYWORDS: _items,
    ("contains",): _contains,
    PROPERTY_KEYWORDS: _properties,
    ("required",): _required,
    ("minProperties",): _min_properties,
    ("maxProperties",): _max_properties,
    ("propertyNames",): _property_names,
    ("dependentRequired", "dependentSchemas", "dependencies"): _dependents,
    ("$ref", "$dynamicRef", "$recursiveRef"): _references,
    ("allOf",): _all_of,
    ("anyOf",): _any_of,
    ("oneOf",): _one_of,
    ("not",): _not,
    ("if",): _if,
}
"""By the keywords that one function takes together. The order decides nothing but the order of properties."""
