"""How a value can fail a keyword, as alternatives of goals; and what of that cannot be said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

from grammar_sync.schema.document import Schema, pointer
from grammar_sync.schema.goals import (
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
    above,
    below,
    contains_of,
    dependents,
    divisor,
    integral,
    item_set,
    lower_bounds,
    property_set,
    referred,
    type_names,
    upper_bounds,
)
from grammar_sync.schema.site import Site, inner, inner_checks
from grammar_sync.schema.state import JSON_TYPES, Contains, ItemSet, PropertySet, TextConstraint
from grammar_sync.schema.values import as_fraction, count, listing, names, text

Alternatives: TypeAlias = list[Goals]
Negative: TypeAlias = Callable[[Site], Alternatives]


class CannotNegateError(ValueError):
    """What fails a keyword is no language that can be written; carries the keyword's path and the reason."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


def _types(at: Site) -> Alternatives:
    given = type_names(at.schema)
    others = [name for name in JSON_TYPES if name not in given]
    if "integer" not in given or "number" in given:
        return [(only(*others),)]
    rest = [name for name in others if name != "number"]
    return [(only(*rest),), (only("number"), Update(lambda state: integral(state, wanted=False)))]


def _enum(at: Site) -> Alternatives:
    return [tuple(_other_than(at.schema, "enum", value) for value in listing(at.schema, "enum"))]


def _const(at: Site) -> Alternatives:
    return [(_other_than(at.schema, "const", at.schema.get("const")),)]


def _other_than(schema: Schema, keyword: str, value: Any) -> Update:
    if value is None:
        return Update(lambda state: replace(state, null=False))
    if isinstance(value, bool):
        return Update(lambda state: replace(state, booleans=state.booleans - {value}))
    if isinstance(value, int | float):
        excluded = as_fraction(value)
        return numbers(lambda old: replace(old, excluded=old.excluded | {excluded}))
    if isinstance(value, str):
        return strings(lambda old: replace(old, excluded=old.excluded | {value}))
    if value == []:
        return at_least_items(1)
    if value == {}:
        return at_least_properties(1, pointer(schema.path, keyword))
    raise CannotNegateError(pointer(schema.path, keyword), "an object or array cannot be excluded")


def _lower(at: Site) -> Alternatives:
    return [(only("number"), numbers(below(value, not is_open))) for value, is_open in lower_bounds(at.schema)]


def _upper(at: Site) -> Alternatives:
    return [(only("number"), numbers(above(value, not is_open))) for value, is_open in upper_bounds(at.schema)]


def _multiple_of(at: Site) -> Alternatives:
    value = divisor(at.schema)
    return [(only("number"), numbers(lambda old: replace(old, not_multiples=(*old.not_multiples, value))))]


def _min_length(at: Site) -> Alternatives:
    least = count(at.schema, "minLength")
    return [(only("string"), at_most_characters(least - 1))] if least else []


def _max_length(at: Site) -> Alternatives:
    return [(only("string"), at_least_characters(count(at.schema, "maxLength") + 1))]


def _pattern(at: Site) -> Alternatives:
    return [
        _not_matching(TextConstraint("pattern", text(at.schema, "pattern"), False, pointer(at.schema.path, "pattern")))
    ]


def _format(at: Site) -> Alternatives:
    name = text(at.schema, "format")
    if not at.context.known_format(name):
        return []
    return [_not_matching(TextConstraint("format", name, False, pointer(at.schema.path, "format")))]


def _not_matching(constraint: TextConstraint) -> Goals:
    return only("string"), strings(lambda old: replace(old, constraints=(*old.constraints, constraint)))


def _min_items(at: Site) -> Alternatives:
    least = count(at.schema, "minItems")
    return [(only("array"), at_most_items(least - 1))] if least else []


def _max_items(at: Site) -> Alternatives:
    return [(only("array"), at_least_items(count(at.schema, "maxItems") + 1))]


def _unique_items(at: Site) -> Alternatives:
    if at.schema.get("uniqueItems") is not True:
        return []
    raise CannotNegateError(pointer(at.schema.path, "uniqueItems"), "a repeated item cannot be demanded")


def _items(at: Site) -> Alternatives:
    items = item_set(at.context, at.schema)
    found: Alternatives = []
    for index, one in enumerate(items.prefix):
        failing = tuple((member, not positive) for member, positive in one)
        prefix = (*((),) * index, failing)
        found.append((only("array"), at_least_items(index + 1), with_items(ItemSet(prefix))))
    if items.rest is not None:
        place = pointer(at.schema.path, "items")
        if items.prefix:
            raise CannotNegateError(place, "items after a prefix that fail their schema cannot be demanded")
        failing = tuple((member, not positive) for member, positive in items.rest)
        found.append((only("array"), with_contains(Contains(failing, (items.rest,), 1, None, place))))
    return found


def _contains(at: Site) -> Alternatives:
    contains = contains_of(at.context, at.schema)
    found: Alternatives = []
    if contains.least:
        found.append((only("array"), with_contains(replace(contains, least=0, most=contains.least - 1))))
    if contains.most is not None:
        found.append((only("array"), with_contains(replace(contains, least=contains.most + 1, most=None))))
    return found


def _properties(at: Site) -> Alternatives:
    properties = property_set(at.context, at.schema)
    found: Alternatives = []
    for name, one in properties.properties.items():
        failing = tuple((member, not positive) for member, positive in one)
        found.append((only("object"), requiring([name]), with_properties(PropertySet({name: failing}))))
    fails_nowhere = properties.additional is None or properties.additional[0][0].value in (True, {})
    if properties.patterns or not fails_nowhere:
        found.append((only("object"), objects(lambda old: replace(old, failing=(*old.failing, properties)))))
    return found


def _required(at: Site) -> Alternatives:
    if at.context.document.draft == 4 and isinstance(at.schema.get("required"), bool):
        return []
    return [(only("object"), forbidding(name)) for name in names(at.schema, "required")]


def _min_properties(at: Site) -> Alternatives:
    least = count(at.schema, "minProperties")
    place = pointer(at.schema.path, "minProperties")
    return [(only("object"), at_most_properties(least - 1, place))] if least else []


def _max_properties(at: Site) -> Alternatives:
    most = count(at.schema, "maxProperties")
    return [(only("object"), at_least_properties(most + 1, pointer(at.schema.path, "maxProperties")))]


def _property_names(at: Site) -> Alternatives:
    raise CannotNegateError(pointer(at.schema.path, "propertyNames"), "a name that fails this cannot be demanded")


def _dependents(at: Site) -> Alternatives:
    found: Alternatives = []
    for _, name, needed in dependents(at.context, at.schema):
        if isinstance(needed, Schema):
            found.append((only("object"), requiring([name]), inner(at.check, needed, positive=False)))
        else:
            found.extend((only("object"), requiring([name]), forbidding(missing)) for missing in needed)
    return found


def _references(at: Site) -> Alternatives:
    return [(inner(at.check, target, positive=False),) for target in referred(at.context, at.schema)]


def _all_of(at: Site) -> Alternatives:
    return [(one,) for one in inner_checks(at.context, at.check, "allOf", positive=False)]


def _any_of(at: Site) -> Alternatives:
    return [inner_checks(at.context, at.check, "anyOf", positive=False)]


def _one_of(at: Site) -> Alternatives:
    without = inner_checks(at.context, at.check, "oneOf", positive=False)
    found: Alternatives = [without]
    bare = replace(at.check, scopes=frozenset())
    checks = inner_checks(at.context, bare, "oneOf")
    for index, one in enumerate(checks):
        found.extend(
            (one, other) for other in checks[index + 1 :] if not at.context.is_disjoint(one.schema, other.schema)
        )
    return found


def _not(at: Site) -> Alternatives:
    return [(inner(replace(at.check, scopes=frozenset()), at.context.document.child(at.schema, "not")),)]


def _if(at: Site) -> Alternatives:
    child = at.context.document.child
    bare = replace(at.check, scopes=frozenset())
    found: Alternatives = []
    if at.schema.get("then") is not None:
        found.append((inner(bare, child(at.schema, "if")), inner(at.check, child(at.schema, "then"), positive=False)))
    if at.schema.get("else") is not None:
        condition = inner(at.check, child(at.schema, "if"), positive=False)
        found.append((condition, inner(at.check, child(at.schema, "else"), positive=False)))
    return found


def _unevaluated(at: Site) -> Alternatives:
    raise CannotNegateError(at.schema.path, "what is left unevaluated cannot be demanded to fail")


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
