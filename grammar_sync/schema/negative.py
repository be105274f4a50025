"""How a value can fail a keyword, as alternatives of goals; and what of that cannot be said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Final, TypeAlias

from grammar_sync.schema.document import Schema, pointer
from grammar_sync.schema.goals import (
    Check,
    Goals,
    Update,
    at_least_characters,
    at_least_items,
    at_least_properties,
    at_most_characters,
    at_most_items,
    at_most_properties,
    forbidding,
    numbers,
    objects,
    only,
    requiring,
    strings,
    with_contains,
    with_items,
    with_properties,
)
from grammar_sync.schema.positive import (
    ITEM_KEYWORDS,
    PROPERTY_KEYWORDS,
    Context,
    contains_of,
    dependents,
    divisor,
    inner,
    inner_checks,
    integral,
    item_set,
    lower_bounds,
    property_set,
    referred,
    type_names,
    upper_bounds,
)
from grammar_sync.schema.state import JSON_TYPES, Contains, ItemSet, Numbers, PropertySet, TextConstraint
from grammar_sync.schema.values import count, listing, names, text

Alternatives: TypeAlias = list[Goals]
Negative: TypeAlias = Callable[[Context, Schema, Check], Alternatives]


class CannotNegateError(ValueError):
    """What fails a keyword is no language that can be written; carries the keyword's path and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def _types(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    given = type_names(schema)
    others = [name for name in JSON_TYPES if name not in given]
    if "integer" not in given or "number" in given:
        return [(only(*others),)]
    rest = [name for name in others if name != "number"]
    return [(only(*rest),), (only("number"), Update(lambda state: integral(state, wanted=False)))]


def _enum(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [tuple(_other_than(schema, "enum", value) for value in listing(schema, "enum"))]


def _const(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [(_other_than(schema, "const", schema.get("const")),)]


def _other_than(schema: Schema, keyword: str, value: Any) -> Update:
    if value is None:
        return Update(lambda state: replace(state, null=False))
    if isinstance(value, bool):
        return Update(lambda state: replace(state, booleans=state.booleans - {value}))
    if isinstance(value, int | float):
        excluded = Fraction(str(value)) if isinstance(value, float) else Fraction(value)
        return numbers(lambda old: replace(old, excluded=old.excluded | {excluded}))
    if isinstance(value, str):
        return strings(lambda old: replace(old, excluded=old.excluded | {value}))
    if value == []:
        return at_least_items(1)
    if value == {}:
        return at_least_properties(1, pointer(schema.path, keyword))
    raise CannotNegateError(pointer(schema.path, keyword), "an object or array cannot be excluded")


def _lower(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [(only("number"), numbers(_below(value, not is_open))) for value, is_open in lower_bounds(schema)]


def _upper(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [(only("number"), numbers(_above(value, not is_open))) for value, is_open in upper_bounds(schema)]


def _above(value: Fraction, is_open: bool) -> Callable[[Numbers], Numbers]:
    return lambda old: old.above(value, is_open=is_open)


def _below(value: Fraction, is_open: bool) -> Callable[[Numbers], Numbers]:
    return lambda old: old.below(value, is_open=is_open)


def _multiple_of(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    value = divisor(schema)
    return [(only("number"), numbers(lambda old: replace(old, not_multiples=(*old.not_multiples, value))))]


def _min_length(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    least = count(schema, "minLength")
    return [(only("string"), at_most_characters(least - 1))] if least else []


def _max_length(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [(only("string"), at_least_characters(count(schema, "maxLength") + 1))]


def _pattern(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [_not_matching(TextConstraint("pattern", text(schema, "pattern"), False, pointer(schema.path, "pattern")))]


def _format(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    name = text(schema, "format")
    if not context.known_format(name):
        return []
    return [_not_matching(TextConstraint("format", name, False, pointer(schema.path, "format")))]


def _not_matching(constraint: TextConstraint) -> Goals:
    return only("string"), strings(lambda old: replace(old, constraints=(*old.constraints, constraint)))


def _min_items(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    least = count(schema, "minItems")
    return [(only("array"), at_most_items(least - 1))] if least else []


def _max_items(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [(only("array"), at_least_items(count(schema, "maxItems") + 1))]


def _unique_items(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    if schema.get("uniqueItems") is not True:
        return []
    raise CannotNegateError(pointer(schema.path, "uniqueItems"), "a repeated item cannot be demanded")


def _items(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    items = item_set(context, schema)
    found: Alternatives = []
    for index, one in enumerate(items.prefix):
        failing = tuple((member, not positive) for member, positive in one)
        prefix = (*((),) * index, failing)
        found.append((only("array"), at_least_items(index + 1), with_items(ItemSet(prefix))))
    if items.rest is not None:
        place = pointer(schema.path, "items")
        if items.prefix:
            raise CannotNegateError(place, "items after a prefix that fail their schema cannot be demanded")
        failing = tuple((member, not positive) for member, positive in items.rest)
        found.append((only("array"), with_contains(Contains(failing, (items.rest,), 1, None, place))))
    return found


def _contains(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    contains = contains_of(context, schema)
    found: Alternatives = []
    if contains.least:
        found.append((only("array"), with_contains(replace(contains, least=0, most=contains.least - 1))))
    if contains.most is not None:
        found.append((only("array"), with_contains(replace(contains, least=contains.most + 1, most=None))))
    return found


def _properties(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    properties = property_set(context, schema)
    found: Alternatives = []
    for name, one in properties.properties.items():
        failing = tuple((member, not positive) for member, positive in one)
        found.append((only("object"), requiring([name]), with_properties(PropertySet({name: failing}))))
    fails_nowhere = properties.additional is None or properties.additional[0][0].value in (True, {})
    if properties.patterns or not fails_nowhere:
        found.append((only("object"), objects(lambda old: replace(old, failing=(*old.failing, properties)))))
    return found


def _required(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    if context.document.draft == 4 and isinstance(schema.get("required"), bool):
        return []
    return [(only("object"), forbidding(name)) for name in names(schema, "required")]


def _min_properties(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    least = count(schema, "minProperties")
    place = pointer(schema.path, "minProperties")
    return [(only("object"), at_most_properties(least - 1, place))] if least else []


def _max_properties(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    most = count(schema, "maxProperties")
    return [(only("object"), at_least_properties(most + 1, pointer(schema.path, "maxProperties")))]


def _property_names(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    raise CannotNegateError(pointer(schema.path, "propertyNames"), "a name that fails this cannot be demanded")


def _dependents(context: Context, schema: Schema, check: Check) -> Alternatives:
    found: Alternatives = []
    for _, name, needed in dependents(context, schema):
        if isinstance(needed, Schema):
            found.append((only("object"), requiring([name]), inner(check, needed, positive=False)))
        else:
            found.extend((only("object"), requiring([name]), forbidding(missing)) for missing in needed)
    return found


def _references(context: Context, schema: Schema, check: Check) -> Alternatives:
    return [(inner(check, target, positive=False),) for target in referred(context, schema)]


def _all_of(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [(one,) for one in inner_checks(context, check, "allOf", positive=False)]


def _any_of(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    return [inner_checks(context, check, "anyOf", positive=False)]


def _one_of(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    without = inner_checks(context, check, "oneOf", positive=False)
    found: Alternatives = [without]
    bare = replace(check, scopes=frozenset())
    checks = inner_checks(context, bare, "oneOf")
    for index, one in enumerate(checks):
        found.extend((one, other) for other in checks[index + 1 :] if not context.is_disjoint(one.schema, other.schema))
    return found


def _not(context: Context, schema: Schema, check: Check) -> Alternatives:
    return [(inner(replace(check, scopes=frozenset()), context.document.child(schema, "not")),)]


def _if(context: Context, schema: Schema, check: Check) -> Alternatives:
    child = context.document.child
    bare = replace(check, scopes=frozenset())
    found: Alternatives = []
    if schema.get("then") is not None:
        found.append((inner(bare, child(schema, "if")), inner(check, child(schema, "then"), positive=False)))
    if schema.get("else") is not None:
        condition = inner(check, child(schema, "if"), positive=False)
        found.append((condition, inner(check, child(schema, "else"), positive=False)))
    return found


def _unevaluated(context: Context, schema: Schema, check: Check) -> Alternatives:  # noqa: ARG001
    raise CannotNegateError(schema.path, "what is left unevaluated cannot be demanded to fail")


NEGATIVE: Final[Mapping[tuple[str, ...], Negative]] = {
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
    ("unevaluatedProperties", "unevaluatedItems"): _unevaluated,
}
"""By the keywords that one function takes together: the same as in positive.py, and what is said of the rest."""
