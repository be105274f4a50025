"""What a keyword asks of a valid value, as goals: one function a keyword, or a group that belongs together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Final, TypeAlias

from grammar_sync.schema.document import Conjunction, Schema, pointer
from grammar_sync.schema.goals import (
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
from grammar_sync.schema.site import Context, Site, inner, inner_checks
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


Positive: TypeAlias = Callable[[Site], Goals]


def _types(at: Site) -> Goals:
    return (Update(lambda state: _typed(state, type_names(at.schema))),)


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


def _enum(at: Site) -> Goals:
    return (among(listing(at.schema, "enum")),)


def _const(at: Site) -> Goals:
    return (among([at.schema.get("const")]),)


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


def _lower(at: Site) -> Goals:
    return tuple(numbers(above(value, is_open)) for value, is_open in lower_bounds(at.schema))


def _upper(at: Site) -> Goals:
    return tuple(numbers(below(value, is_open)) for value, is_open in upper_bounds(at.schema))


def above(value: Fraction, is_open: bool) -> Callable[[Numbers], Numbers]:
    """Returns the update that bounds numbers from below."""
    return lambda old: old.above(value, is_open=is_open)


def below(value: Fraction, is_open: bool) -> Callable[[Numbers], Numbers]:
    """Returns the update that bounds numbers from above."""
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


def _multiple_of(at: Site) -> Goals:
    value = divisor(at.schema)
    return (numbers(lambda old: replace(old, multiples=(*old.multiples, value))),)


def _min_length(at: Site) -> Goals:
    return (at_least_characters(count(at.schema, "minLength")),)


def _max_length(at: Site) -> Goals:
    return (at_most_characters(count(at.schema, "maxLength")),)


def _pattern(at: Site) -> Goals:
    constraint = TextConstraint(
        "pattern", text(at.schema, "pattern"), positive=True, path=pointer(at.schema.path, "pattern")
    )
    return (strings(lambda old: replace(old, constraints=(*old.constraints, constraint))),)


def _format(at: Site) -> Goals:
    name = text(at.schema, "format")
    if not at.context.known_format(name):
        return ()
    constraint = TextConstraint("format", name, positive=True, path=pointer(at.schema.path, "format"))
    return (strings(lambda old: replace(old, constraints=(*old.constraints, constraint))),)


def _min_items(at: Site) -> Goals:
    return (at_least_items(count(at.schema, "minItems")),)


def _max_items(at: Site) -> Goals:
    return (at_most_items(count(at.schema, "maxItems")),)


def _unique_items(at: Site) -> Goals:
    if not boolean(at.schema, "uniqueItems"):
        return ()
    return (arrays(lambda old: replace(old, unique_path=pointer(at.schema.path, "uniqueItems"))),)


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


def _items(at: Site) -> Goals:
    return (with_items(item_set(at.context, at.schema, at.check.scopes)),)


def contains_of(context: Context, schema: Schema) -> Contains:
    """Returns what ``contains`` counts and how often it must be there."""
    items = context.document.child(schema, "contains")
    counted = context.document.draft >= 2019
    least = count(schema, "minContains") if counted and schema.get("minContains") is not None else 1
    most = count(schema, "maxContains") if counted and schema.get("maxContains") is not None else None
    return Contains(((items, True),), (((items, False),),), least, most, pointer(schema.path, "contains"))


def _contains(at: Site) -> Goals:
    return (with_contains(contains_of(at.context, at.schema)),)


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


def _properties(at: Site) -> Goals:
    return (with_properties(property_set(at.context, at.schema, at.check.scopes)),)


def _required(at: Site) -> Goals:
    if at.context.document.draft == 4 and isinstance(at.schema.get("required"), bool):
        return ()
    return (requiring(names(at.schema, "required")),)


def _min_properties(at: Site) -> Goals:
    return (at_least_properties(count(at.schema, "minProperties"), pointer(at.schema.path, "minProperties")),)


def _max_properties(at: Site) -> Goals:
    return (at_most_properties(count(at.schema, "maxProperties"), pointer(at.schema.path, "maxProperties")),)


def _property_names(at: Site) -> Goals:
    return (with_names(((at.context.document.child(at.schema, "propertyNames"), True),)),)


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


def _dependents(at: Site) -> Goals:
    goals = []
    for keyword, name, needed in dependents(at.context, at.schema):
        if isinstance(needed, Schema):
            with_name: Goals = (only("object"), requiring([name]), inner(at.check, needed))
        else:
            # What is needed comes first, where no at.schema declares an order.
            with_name = (only("object"), requiring((*needed, name)))
        alternatives = ((other_than("object"),), (only("object"), forbidding(name)), with_name)
        goals.append(Choice(alternatives, pointer(at.schema.path, keyword, name)))
    return tuple(goals)


def _all_of(at: Site) -> Goals:
    return inner_checks(at.context, at.check, "allOf")


def _any_of(at: Site) -> Goals:
    checks = inner_checks(at.context, at.check, "anyOf")
    return (Choice(tuple((one,) for one in checks), pointer(at.schema.path, "anyOf")),)


def _one_of(at: Site) -> Goals:
    checks = inner_checks(at.context, at.check, "oneOf")
    alternatives: list[Goals] = []
    for index, one in enumerate(checks):
        others: list[Goal] = [
            inner(at.check, other.schema, positive=False)
            for place, other in enumerate(checks)
            if place != index and not at.context.is_disjoint(one.schema, other.schema)
        ]
        alternatives.append((one, *others))
    return (Choice(tuple(alternatives), pointer(at.schema.path, "oneOf")),)


def _not(at: Site) -> Goals:
    return (inner(at.check, at.context.document.child(at.schema, "not"), positive=False),)


def _if(at: Site) -> Goals:
    if at.schema.get("then") is None and at.schema.get("else") is None:
        return ()
    child = at.context.document.child
    condition = child(at.schema, "if")
    taken: list[Goal] = [inner(at.check, condition)]
    left: list[Goal] = [inner(at.check, condition, positive=False)]
    if at.schema.get("then") is not None:
        taken.append(inner(at.check, child(at.schema, "then")))
    if at.schema.get("else") is not None:
        left.append(inner(at.check, child(at.schema, "else")))
    return (Choice((tuple(taken), tuple(left)), pointer(at.schema.path, "if")),)


def referred(context: Context, schema: Schema) -> list[Schema]:
    """Returns the schemas that a schema refers to."""
    keywords = ("$ref", "$dynamicRef", "$recursiveRef")
    return [context.document.resolve(schema, keyword) for keyword in keywords if schema.get(keyword) is not None]


def _references(at: Site) -> Goals:
    return tuple(inner(at.check, target) for target in referred(at.context, at.schema))


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
