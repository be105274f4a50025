"""JSON Schemas as context-free grammars: exact by construction, whatever an engine's own reading of a schema is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from grammar_sync.engines.prepared import CompileError, Finding
from grammar_sync.regular.chars import RegularError
from grammar_sync.regular.language import MAX_COUNTED_LENGTH, Language, words
from grammar_sync.schema.arrays import MAX_COUNTED_STATES as MAX_ITEM_STATES
from grammar_sync.schema.arrays import MAX_DIFFERENT_ITEMS, Counted, different, listed
from grammar_sync.schema.document import Conjunction, Document, pointer
from grammar_sync.schema.goals import value_key
from grammar_sync.schema.layout import Layout
from grammar_sync.schema.numbers import number_language
from grammar_sync.schema.objects import (
    MAX_COUNTED_STATES,
    MAX_OVERLAPPING_PATTERNS,
    Members,
    Names,
    Property,
    declared,
    names_language,
    regions,
)
from grammar_sync.schema.oracle import Oracle
from grammar_sync.schema.productions import (
    NOTHING,
    Call,
    Expression,
    Literal,
    NoOutputError,
    Terminal,
    options,
    productive,
    sequence,
)
from grammar_sync.schema.state import Arrays, Numbers, Objects, State, Strings
from grammar_sync.schema.strings import (
    TextError,
    format_checker,
    known_format,
    name_matches,
    narrowing,
    natural_lengths,
    string_language,
    string_terminal,
    wrong_pattern,
)
from grammar_sync.schema.walk import SchemaWalk
from grammar_sync.spec import GrammarOptions

ROOT: Final = "root"
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
MAX_RULES: Final = 8_000
"""Bound on the rules of one grammar."""

MAX_ITEMS: Final = 4096
"""Bound on minItems; a greater maxItems is taken for this one."""

MAX_LENGTH: Final = 65_536
"""Bound on minLength; a greater maxLength is taken for this one."""


@dataclass(frozen=True)
class SchemaGrammar:
    """A schema's grammar.

    Attributes:
        rules: By name; it starts at ``ROOT``.
        not_enforced: What the grammar does not enforce.
        rewritten: Where it allows less than the schema.
    """

    rules: dict[str, Expression | Terminal]
    not_enforced: tuple[Finding, ...]
    rewritten: tuple[Finding, ...]


def schema_grammar(source: str, options_: GrammarOptions) -> SchemaGrammar:
    """Returns the grammar of a JSON Schema.

    Args:
        source: The schema as JSON.
        options_: How it is to be enforced.

    Raises:
        CompileError: The schema is wrong, allows nothing, or has what cannot be enforced and is strict.
    """
    return _Builder(json.loads(source), options_).build()


class _Builder:
    def __init__(self, schema: Any, options_: GrammarOptions) -> None:
        self._options = options_
        self._layout = Layout(options_)
        document = Document(schema)
        oracle = Oracle(document, format_checker())
        self._walk = SchemaWalk(document, oracle, known_format, name_matches, strict=options_.strict)
        self._rules: dict[str, Expression | Terminal] = {}
        self._values: dict[Conjunction, Call] = {}
        self._places: dict[str, str] = {}
        self._terminals: dict[Strings | Numbers, Call | None] = {}
        self._names_known: dict[Names, Call | None] = {}
        self._waiting: list[tuple[str, Callable[[], Expression]]] = []
        self._rewritten: dict[Finding, None] = {}
        self._root: Conjunction = ((document.root, True),)

    def build(self) -> SchemaGrammar:
        """Returns the grammar."""
        self._rules.update(self._layout.blanks())
        self._rules[ROOT] = NOTHING
        root = self._value(self._root)
        self._rules[ROOT] = root
        while self._waiting:
            name, build = self._waiting.pop()
            self._rules[name] = build()
        try:
            rules = productive(self._rules, ROOT)
        except NoOutputError as error:
            place = next((self._places[name] for name in reversed(error.rules) if name in self._places), "")
            raise CompileError(f"{place or 'the schema'}: {error}: nothing is valid here") from error
        return SchemaGrammar(rules, tuple(self._walk.not_enforced), (*self._walk.rewritten, *self._rewritten))

    def _add_rule(self, build: Callable[[], Expression]) -> Call:
        name = self._fresh("r")
        self._waiting.append((name, build))
        return Call(name)

    def _fresh(self, kind: str) -> str:
        name = f"{kind}{len(self._rules)}"
        if len(self._rules) > MAX_RULES:
            raise CompileError(f"the schema takes more than {MAX_RULES} rules")
        self._rules[name] = NOTHING
        return name

    def _add_terminal(self, terminal: Terminal) -> Call:
        name = self._fresh("t")
        self._rules[name] = terminal
        return Call(name)

    def _value(self, conjunction: Conjunction) -> Call:
        if conjunction not in self._values:
            name = self._fresh("v")
            self._values[conjunction] = Call(name)
            self._places[name] = conjunction[0][0].path if conjunction else ""
            self._waiting.append((name, lambda: self._body(conjunction)))
        return self._values[conjunction]

    def _body(self, conjunction: Conjunction) -> Expression:
        path = conjunction[0][0].path if conjunction else ""
        return options(*(self._state(state, path) for state in self._walk.states(conjunction)))

    def _state(self, state: State, path: str) -> Expression:
        if state.values is not None:
            return options(*(self._layout.value(value) for value in state.values))
        found: list[Expression] = [Literal("null")] if state.null else []
        found.extend(Literal(json.dumps(value)) for value in sorted(state.booleans, reverse=True))
        if state.number is not None:
            found.append(self._number(state.number, path))
        if state.string is not None:
            found.append(self._string(state.string, path))
        if state.array is not None:
            found.append(self._array(state.array, path))
        if state.object is not None:
            found.append(self._object(state.object, path))
        return options(*found)

    def _number(self, record: Numbers, path: str) -> Expression:
        if record not in self._terminals:
            terminal = self._number_terminal(record, path)
            self._terminals[record] = None if terminal is None else self._add_terminal(terminal)
        return self._terminals[record] or NOTHING

    def _number_terminal(self, record: Numbers, path: str) -> Terminal | None:
        try:
            language = number_language(record)
            terminal = None if language is None else Terminal(language)
            if terminal is not None and (record.multiples or record.not_multiples):
                terminal.check()
        except RegularError as error:
            divided = bool(record.multiples or record.not_multiples)
            place = self._walk.place(path, ("multipleOf",) if divided else _BOUNDS)
            self._walk.refuse(place, place.rpartition("/")[2], str(error))
            weaker = (
                replace(record, multiples=(), not_multiples=()) if divided else replace(record, low=None, high=None)
            )
            if weaker == record:
                raise CompileError(f"{place or 'the schema'}: {error}") from error
            return self._number_terminal(weaker, path)
        return terminal

    def _string(self, record: Strings, path: str) -> Expression:
        if record not in self._terminals:
            terminal = self._string_terminal(record, path)
            self._terminals[record] = None if terminal.language.is_empty() else self._add_terminal(terminal)
        return self._terminals[record] or NOTHING

    def _string_terminal(self, record: Strings, path: str) -> Terminal:
        most = MAX_COUNTED_LENGTH if record.constraints else MAX_LENGTH
        if record.min_length > most:
            raise CompileError(f"{path or 'the schema'}: minLength is {record.min_length}, at most {most} is allowed")
        if record.max_length is None and self._options.max_string_length is not None:
            bounded = self._bounded(record, path, self._options.max_string_length)
            if bounded is not None:
                return bounded
        if record.max_length is not None and record.max_length > most:
            record = replace(record, max_length=most)
            self._note(path, "maxLength", f"strings have at most {most} characters")
        try:
            terminal = string_terminal(record)
        except TextError as error:
            terminal_ = self._without_length(record, path)
            if terminal_ is None:
                place = error.path or self._walk.place(path, ("enum", "const", "not"))
                self._walk.refuse(place, place.rpartition("/")[2], str(error))
                return string_terminal(Strings(record.min_length, record.max_length))
            terminal = terminal_
        self._note_narrowing(record)
        return terminal

    def _note_narrowing(self, record: Strings) -> None:
        notes = map(narrowing, record.constraints)
        self._rewritten.update(dict.fromkeys(note for note in notes if note is not None))

    def _bounded(self, record: Strings, path: str, bound: int) -> Terminal | None:
        """Returns the strings no longer than ``max_string_length``; None where that changes nothing or cannot be."""
        try:
            least, most = natural_lengths(record)
            if most is not None:
                return None
            record = replace(record, max_length=max(bound, least))
            terminal = string_terminal(record)
        except TextError as error:
            message = f"not applied: strings of a bounded length take too large an automaton ({error})"
            self._walk.not_enforced[Finding(path, "max_string_length", message)] = None
            return None
        self._note(path, "max_string_length", f"strings have at most {record.max_length} characters")
        self._note_narrowing(record)
        return terminal

    def _without_length(self, record: Strings, path: str) -> Terminal | None:
        """Returns the strings without one or both bounds on their length, where these are what makes them too large."""
        if not record.constraints:
            return None
        for dropped in (("maxLength",), ("minLength",), ("maxLength", "minLength")):
            weaker = replace(
                record,
                min_length=0 if "minLength" in dropped else record.min_length,
                max_length=None if "maxLength" in dropped else record.max_length,
            )
            if weaker == record:
                continue
            try:
                terminal = string_terminal(weaker)
            except TextError:
                continue
            told = " and ".join(one.told() for one in record.constraints)
            for keyword in dropped:
                length = record.max_length if keyword == "maxLength" else record.min_length
                message = f"{keyword} {length} together with {told} takes too large an automaton"
                hint = "" if self._options.strict else f"; {keyword} is not enforced"
                self._walk.refuse(self._walk.place(path, (keyword,)), keyword, message + hint)
            return terminal
        return None

    def _array(self, record: Arrays, path: str) -> Expression:
        if record.min_items > MAX_ITEMS:
            raise CompileError(
                f"{path or 'the schema'}: minItems is {record.min_items}, at most {MAX_ITEMS} is allowed"
            )
        bound = self._options.max_items
        if bound is not None and record.max_items is None:
            record = replace(record, max_items=max(bound, record.min_items))
            self._note(path, "max_items", f"arrays have at most {record.max_items} items")
        elif record.max_items is not None and record.max_items > MAX_ITEMS:
            record = replace(record, max_items=MAX_ITEMS)
            self._note(path, "maxItems", f"arrays have at most {MAX_ITEMS} items")
        if record.unique_path is not None and record.max_items not in (0, 1):
            items = self._few_values(record)
            if items is not None:
                return different([self._layout.value(item) for item in items], record, self._layout, self._add_rule)
            self._walk.refuse(
                record.unique_path,
                "uniqueItems",
                f"items can be kept different only where they are {MAX_DIFFERENT_ITEMS} values or fewer",
            )
        if not record.contains:
            return listed(record, self._layout, self._value)
        contains, *others = record.contains
        for other in others:
            self._walk.refuse(other.path, "contains", "only one contains at a place can be enforced")
        counted = Counted(record, contains, self._layout, self._value, self._add_rule)
        if counted.state_count() > MAX_ITEM_STATES:
            self._walk.refuse(contains.path, "contains", "the counts of items are too great to be kept")
            return listed(record, self._layout, self._value)
        return counted.body()

    def _few_values(self, record: Arrays) -> list[Any] | None:
        """Returns the values that items can have, when these are few and the same at each position."""
        if record.contains or record.prefix_length:
            return None
        found: dict[Any, Any] = {}
        for state in self._walk.states(record.item(0)):
            values: list[Any]
            if state.values is not None:
                values = list(state.values)
            elif state.number is None and state.string is None and state.array is None and state.object is None:
                values = [None] * state.null + sorted(state.booleans)
            else:
                return None
            found.update((value_key(value), value) for value in values)
        return list(found.values()) if len(found) <= MAX_DIFFERENT_ITEMS else None

    def _object(self, record: Objects, path: str) -> Expression:
        names, name_allowed = self._names(record)
        known = declared(record, lambda name: self._walk.property(record, name), name_allowed)
        if not {one.name for one in known}.issuperset(record.required):
            return NOTHING
        if record.is_closed():
            at = next(one.path for one in record.sets if one.properties)
            self._note(at, "additionalProperties", "properties that are not declared are left out")
        overlapping = {pattern for one in record.sets for pattern, _ in one.patterns}
        if len(overlapping) > MAX_OVERLAPPING_PATTERNS:
            self._walk.refuse(path, "patternProperties", f"an object has more than {MAX_OVERLAPPING_PATTERNS} patterns")
            record = replace(record, sets=tuple(replace(one, patterns=()) for one in record.sets))
        extras = self._extras(record, known, names, path)
        values: list[tuple[Property, Expression]] = [(one, self._value(one.value)) for one in known]
        members = Members(self._layout, self._add_rule, values, extras, record)
        if (
            members.state_count() > MAX_COUNTED_STATES * (1 + len(known))
            or members.reachable_least() < record.min_properties
        ):
            if members.reachable_least() < record.min_properties and not extras:
                return NOTHING
            self._walk.refuse(
                record.bounds_path,
                record.bounds_path.rpartition("/")[2],
                "properties that are not declared may repeat a name",
            )
            members = Members(
                self._layout, self._add_rule, values, extras, replace(record, min_properties=0, max_properties=None)
            )
        return members.body()

    def _names(self, record: Objects) -> tuple[Language | None, Callable[[str], bool]]:
        if not record.names:
            return None, lambda _: True
        parts: list[Language] = []
        for state in self._walk.states(record.names):
            if state.values is not None:
                parts.append(words([value for value in state.values if isinstance(value, str)]))
            elif state.string is not None:
                try:
                    parts.append(string_language(state.string))
                except TextError as error:
                    self._walk.refuse(error.path, error.keyword, str(error))
                    return None, lambda _: True
        language = parts[0].union(*parts[1:]) if parts else words([])
        return language, language.fullmatch

    def _extras(self, record: Objects, known: list[Property], allowed: Language | None, path: str) -> list[Expression]:
        found: list[Expression] = []
        for region in regions(record, known):
            try:
                names = self._region_names(region.names, allowed)
            except RegularError as error:
                wrong = wrong_pattern(region.names.patterns)
                place = path if wrong is None else pointer(self._walk.place(path, ("patternProperties",)), wrong)
                self._walk.refuse(place, "patternProperties", str(error))
                names = self._region_names(replace(region.names, patterns=(), names=()), None)
            if names is not None:
                found.append(sequence(names, self._layout.colon, self._value(region.value)))
        return found

    def _region_names(self, names: Names, allowed: Language | None) -> Call | None:
        if names not in self._names_known:
            language = names_language(names, allowed)
            terminal = Terminal(language, json_encoded=True, quoted=True)
            if not language.is_empty():
                terminal.check()
            self._names_known[names] = None if language.is_empty() else self._add_terminal(terminal)
        return self._names_known[names]

    def _note(self, path: str, keyword: str, message: str) -> None:
        self._rewritten[Finding(path, keyword, message)] = None
