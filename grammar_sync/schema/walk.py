"""Takes schemas apart into unions of states: every alternative of a conjunction, with all its constraints together.

Works as a tableau does: goals are replaced by what they ask for until only alternatives are left, and then each is
tried. A schema that must not be valid asks for one of the ways in which it can fail. References are followed, so that
what they lead to is merged with what stands beside them; properties and items keep conjunctions of schemas, which are
taken apart when their turn comes. That makes recursion end: there are finitely many conjunctions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from grammar_sync.engines.prepared import CompileError, Finding
from grammar_sync.regular.chars import RegularError
from grammar_sync.schema.document import Conjunction, Document, Schema, conjoin, pointer
from grammar_sync.schema.goals import Check, Choice, Goal, Goals, Scopes, Update, with_items, with_properties
from grammar_sync.schema.negative import NEGATIVE, CannotNegateError
from grammar_sync.schema.oracle import Oracle
from grammar_sync.schema.positive import POSITIVE
from grammar_sync.schema.site import Context, Site
from grammar_sync.schema.state import ItemSet, Objects, PropertySet, State
from grammar_sync.schema.strings import annotation_note

MAX_ALTERNATIVES = 512
"""Bound on the alternatives of one conjunction, and so on the products of anyOf, oneOf, if and not."""

MAX_STEPS = 20_000
"""Bound on the goals that one document may take."""

_EMPTINESS_DEPTH = 3
_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")


class SchemaWalk:
    """Takes the schemas of one document apart.

    Args:
        document: The document.
        oracle: Judges enumerated values.
        known_format: Whether a format's name means something.
        name_matches: Whether a property's name matches a pattern of ``patternProperties``.
        strict: Whether what cannot be enforced is an error; else it is left out and noted.
    """

    def __init__(
        self,
        document: Document,
        oracle: Oracle,
        known_format: Callable[[str], bool],
        name_matches: Callable[[str, str], bool],
        *,
        strict: bool,
    ) -> None:
        self.document = document
        self.not_enforced: dict[Finding, None] = {}
        self.rewritten: dict[Finding, None] = {}
        self._strict = strict
        self._oracle = oracle
        self._name_matches = name_matches
        self._context = Context(document, self._is_disjoint, known_format)
        self._known_format = known_format
        self._states: dict[Conjunction, tuple[State, ...]] = {}
        self._disjoint: dict[tuple[Schema, Schema], bool] = {}
        self._depth = 0
        self._steps = 0

    def refuse(self, path: str, keyword: str, message: str) -> None:
        """Notes that something is not enforced.

        Raises:
            CompileError: The walk is strict.
        """
        if self._strict:
            raise CompileError(f"{path or 'the schema'}: {message}; give strict: false to run without it")
        self.not_enforced[Finding(path, keyword, message)] = None

    def place(self, path: str, keywords: tuple[str, ...]) -> str:
        """Returns where one of the keywords stands in the schema at a path or what applies to the same value.

        The path itself, where none does.
        """
        waiting = [path]
        for at in waiting:
            schema = self.document.at(at, at)
            found = schema.present(keywords)
            if found:
                return pointer(at, found[0])
            for keyword in schema.present(("allOf", "anyOf", "oneOf")):
                waiting.extend(pointer(at, keyword, index) for index in range(len(schema.get(keyword))))
            waiting.extend(pointer(at, keyword) for keyword in schema.present(("if", "then", "else", "not")))
            references = schema.present(("$ref", "$dynamicRef", "$recursiveRef"))
            waiting.extend(self.document.resolve(schema, keyword).path for keyword in references)
            waiting[:] = dict.fromkeys(waiting)
        return path

    def states(self, conjunction: Conjunction) -> tuple[State, ...]:
        """Returns the alternatives of a conjunction, none of them surely empty; together they are what it allows.

        Raises:
            CompileError: A schema is wrong, or has what cannot be enforced.
        """
        found = self._states.get(conjunction)
        if found is None:
            search = _Search(self, conjunction)
            found = self._states[conjunction] = search.run()
        return found

    def is_empty(self, conjunction: Conjunction) -> bool:
        """Returns whether a conjunction surely allows no value; looks some steps deep."""
        if any(schema.value is (not positive) for schema, positive in conjunction):
            return True
        if len(conjunction) < 2 or self._depth >= _EMPTINESS_DEPTH:
            return False
        self._depth += 1
        try:
            return not self.states(conjunction)
        finally:
            self._depth -= 1

    def property(self, record: Objects, name: str) -> Conjunction:
        """Returns what the property of that name must satisfy."""
        parts: list[Conjunction] = []
        for one in record.sets:
            found = [one.properties[name]] if name in one.properties else []
            place = pointer(one.path, "patternProperties")
            found.extend(part for pattern, part in one.patterns if self._is_matched(pattern, name, place))
            if not found and one.additional is not None:
                found.append(one.additional)
            parts.extend(found)
        return conjoin(*parts)

    def matches(self, pattern: str, name: str) -> bool:
        """Returns whether a property's name matches a pattern."""
        return self._is_matched(pattern, name, "patternProperties")

    def _is_matched(self, pattern: str, name: str, place: str) -> bool:
        try:
            return self._name_matches(pattern, name)
        except RegularError as error:
            raise CompileError(f"{pointer(place, pattern)}: {error}") from error

    def satisfies(self, value: object, conjunction: Conjunction) -> bool:
        """Returns whether one value is what a conjunction allows."""
        return self._oracle.satisfies(value, conjunction)

    def spend(self, path: str) -> None:
        """Counts a step.

        Raises:
            CompileError: There were too many.
        """
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise CompileError(f"{path or 'the schema'}: the schema takes more than {MAX_STEPS} steps to take apart")

    def goals(self, check: Check) -> Goals:
        """Returns what a schema asks for.

        Raises:
            CompileError: The schema is wrong, or has what cannot be enforced.
        """
        schema = check.schema
        self.spend(schema.path)
        self._note_dialect(schema)
        if check.positive:
            return self._positive(check)
        try:
            return self._negative(check)
        except CannotNegateError as error:
            self.refuse(error.path, error.path.rpartition("/")[2], f"cannot be negated: {error.reason}")
            return ()

    def _note_dialect(self, schema: Schema) -> None:
        """Notes forms of draft 4 and of OpenAPI 3.0 that mean something else, or nothing, in the schema's draft."""
        for keyword in ("exclusiveMinimum", "exclusiveMaximum"):
            if self.document.draft != 4 and isinstance(schema.get(keyword), bool):
                message = "true and false are draft 4's form, and read as that"
                self.rewritten[Finding(pointer(schema.path, keyword), keyword, message)] = None
        if schema.get("nullable") is True:
            message = 'nullable is no keyword of JSON Schema and does nothing: write "type": [..., "null"]'
            self.rewritten[Finding(pointer(schema.path, "nullable"), "nullable", message)] = None

    def _positive(self, check: Check) -> Goals:
        schema = check.schema
        scopes = frozenset(pointer(schema.path, name) for name in self._present(schema, _UNEVALUATED))
        check = replace(check, scopes=check.scopes | scopes)
        goals: list[Goal] = []
        if scopes:
            # So that what is unevaluated is known where nothing is evaluated.
            goals = [with_properties(PropertySet(scopes=check.scopes)), with_items(ItemSet(scopes=check.scopes))]
        site = Site(self._context, check)
        for keywords, function in POSITIVE.items():
            if self._present(schema, keywords):
                goals.extend(function(site))
        name = schema.get("format")
        if isinstance(name, str) and self._present(schema, ("format",)) and not self._known_format(name):
            message = f"{annotation_note(name)}: any value passes"
            self.not_enforced[Finding(pointer(schema.path, "format"), "format", message)] = None
        return tuple(goals)

    def _negative(self, check: Check) -> Goals:
        schema = check.schema
        site = Site(self._context, check)
        alternatives: list[Goals] = []
        for keywords, function in NEGATIVE.items():
            if self._present(schema, keywords):
                alternatives.extend(function(site))
        return (Choice(tuple(alternatives), schema.path, self._needed(schema)),)

    def _needed(self, schema: Schema) -> tuple[str, ...]:
        """Returns names that a schema requires, itself or where it refers to; without them an object is not valid."""
        found: list[str] = []
        seen: set[Schema] = set()
        while schema not in seen:
            seen.add(schema)
            if self._present(schema, ("required",)):
                names = schema.get("required")
                found.extend(names if isinstance(names, list) else ())
            if self._present(schema, ("$ref",)):
                schema = self.document.resolve(schema, "$ref")
        return tuple(dict.fromkeys(found))

    def _present(self, schema: Schema, keywords: tuple[str, ...]) -> list[str]:
        if self.document.draft <= 7 and schema.get("$ref") is not None and keywords[0] != "$ref":
            return []
        return schema.present(keywords)

    def _is_disjoint(self, left: Schema, right: Schema) -> bool:
        key = (left, right) if left.path <= right.path else (right, left)
        if key not in self._disjoint:
            self._disjoint[key] = self.is_empty(((key[0], True), (key[1], True)))
        return self._disjoint[key]


class _Search:
    """Finds the alternatives of one conjunction."""

    def __init__(self, walk: SchemaWalk, conjunction: Conjunction) -> None:
        self._walk = walk
        self._conjunction = conjunction
        self._found: dict[int, State] = {}

    def run(self) -> tuple[State, ...]:
        """Returns them."""
        goals: list[Goal] = [Check(schema, positive) for schema, positive in self._conjunction]
        self._take(goals, State(), frozenset(), ())
        return tuple(self._found.values())

    def _take(
        self, goals: list[Goal], state: State, done: frozenset[tuple[Schema, bool, Scopes]], choices: tuple[Choice, ...]
    ) -> None:
        """Meets all goals, then tries the alternatives of the first choice, together with the other choices."""
        seen = set(done)
        waiting = list(choices)
        todo = goals[::-1]
        while todo:
            goal = todo.pop()
            if isinstance(goal, Update):
                state = goal.apply(state)
                if state.is_empty():
                    return
            elif isinstance(goal, Choice):
                waiting.append(goal)
            elif isinstance(goal.schema.value, bool):
                if goal.schema.value is not goal.positive:
                    return
            elif goal.schema in goal.via:
                path = goal.schema.path or "the schema"
                raise CompileError(f"{path} refers to itself without taking a step into the value")
            elif (goal.schema, goal.positive, goal.scopes) not in seen:
                seen.add((goal.schema, goal.positive, goal.scopes))
                todo.extend(reversed(self._walk.goals(goal)))
        state = state.pruned()
        if state.is_empty():
            return
        waiting.sort(key=lambda choice: (bool(choice.missing), len(choice.alternatives)))
        while state.values is None and waiting:
            choice = waiting.pop(0)
            shorter = _without_missing(state, choice)
            if shorter is None:
                for alternative in choice.alternatives:
                    self._walk.spend(choice.path)
                    self._take(list(alternative), state, frozenset(seen), tuple(waiting))
                return
            state = shorter
        self._finish(state)

    def _finish(self, state: State) -> None:
        if state.values is not None:
            values = [value for value in state.values if self._walk.satisfies(value, self._conjunction)]
            if values:
                self._add(State(values=tuple(values)))
            return
        for one in self._with_failing(_evaluated(self._walk.document, state)):
            kept = self._without_empty_children(one)
            if not kept.is_empty():
                self._add(kept)

    def _with_failing(self, state: State) -> list[State]:
        """Returns the state for each choice of the properties that must be invalid, among those that have a name."""
        record = state.object
        if record is None or not record.failing:
            return [state]
        first, *others = record.failing
        rest = replace(record, failing=tuple(others))
        names = dict.fromkeys(name for one in record.sets for name in one.properties)
        if not names and not record.required:
            keyword = "patternProperties" if first.patterns else "additionalProperties"
            message = "cannot be negated: only a property that has a name can be demanded to fail"
            self._walk.refuse(pointer(first.path, keyword), keyword, message)
            return self._with_failing(replace(state, object=rest))
        found = [replace(state, object=None)]
        for name in (*names, *(name for name in record.required if name not in names)):
            parts = self._walk.property(Objects((replace(first, properties={}),)), name)
            if name in first.properties and not any(self._walk.matches(pattern, name) for pattern, _ in first.patterns):
                continue
            for schema, positive in parts:
                failing = PropertySet({name: ((schema, not positive),)})
                with_name = replace(
                    rest, required=tuple(dict.fromkeys((*rest.required, name))), sets=(*rest.sets, failing)
                )
                found.extend(self._with_failing(replace(state.only("object"), object=with_name).pruned()))
        return found

    def _add(self, state: State) -> None:
        self._found[len(self._found)] = state
        if len(self._found) > MAX_ALTERNATIVES:
            path = self._conjunction[0][0].path if self._conjunction else ""
            raise CompileError(
                f"{path or 'the schema'}: its alternatives multiply to more than {MAX_ALTERNATIVES}; "
                "fewer or smaller anyOf, oneOf, if and not are needed"
            )

    def _without_empty_children(self, state: State) -> State:
        array, record = state.array, state.object
        if array is not None:
            for index in range(array.prefix_length + 1):
                if self._walk.is_empty(array.item(index)):
                    most = index if array.max_items is None else min(array.max_items, index)
                    state = replace(state, array=replace(array, max_items=most)).pruned()
                    break
        if record is not None and any(
            self._walk.is_empty(self._walk.property(record, name)) for name in record.required
        ):
            state = replace(state, object=None)
        return state


def _without_missing(state: State, choice: Choice) -> State | None:
    """Returns the state without a property that is left out in any case, where its absence is all that a choice needs.

    Nothing is lost: undeclared properties of an object of which nothing more is said are left out at the end.
    """
    record = state.only_object()
    if record is None or not record.is_closed() or any(one.scopes for one in record.sets):
        return None
    name = next((name for name in choice.missing if not record.declares(name)), None)
    return None if name is None else replace(state, object=replace(record, forbidden=record.forbidden | {name}))


def _evaluated(document: Document, state: State) -> State:
    """Returns the state with a set for each ``unevaluated…`` in force: what was not evaluated must satisfy it."""
    array, record = state.array, state.object
    if record is not None:
        for scope in sorted(frozenset().union(*(one.scopes for one in record.sets))):
            if scope.endswith("/unevaluatedProperties"):
                record = _with_unevaluated_properties(document, record, scope)
        state = replace(state, object=record)
    if array is not None:
        for scope in sorted(frozenset().union(*(one.scopes for one in array.sets))):
            if scope.endswith("/unevaluatedItems"):
                within = [one for one in array.sets if scope in one.scopes]
                if all(one.rest is None for one in within):
                    prefix = ((),) * max(len(one.prefix) for one in within)
                    rest = ((document.at(scope, scope), True),)
                    array = replace(array, sets=(*array.sets, ItemSet(prefix, rest)))
        state = replace(state, array=array)
    return state


def _with_unevaluated_properties(document: Document, record: Objects, scope: str) -> Objects:
    within = [one for one in record.sets if scope in one.scopes]
    if any(one.additional is not None for one in within):
        return record
    names: dict[str, Conjunction] = {name: () for one in within for name in one.properties}
    patterns = tuple((pattern, ()) for one in within for pattern, _ in one.patterns)
    additional = ((document.at(scope, scope), True),)
    return replace(record, sets=(*record.sets, PropertySet(names, patterns, additional)))
