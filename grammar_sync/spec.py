"""What grammar a request asks for: parsed from its fields, bounded in size, and hashable as the key of all caches.

Needs neither torch nor a grammar engine, so that a light process can check requests at the door.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from grammar_sync.canonical import canonical_schema
from grammar_sync.json_text import DuplicateKeyError, parse_json

GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag"]

GRAMMAR_FIELDS: tuple[GrammarKind, ...] = ("json_schema", "json_object", "regex", "ebnf", "choice", "structural_tag")
"""The request fields of which at most one may be given."""

GRAMMAR_OPTION_FIELDS = ("strict", "any_whitespace", "max_whitespace", "max_string_length", "max_items", "ebnf_root")
"""The request fields that say how a grammar is to be enforced."""

DEFAULT_MAX_WHITESPACE = 21
"""Blanks between two JSON tokens: a newline and an indent of 20. Fewer, and small models cannot lay out JSON as they
learnt it and rarely finish; unbounded, and some write blanks until their budget ends."""

MAX_SOURCE_BYTES = 131_072
"""Bound on the canonical text in UTF-8: compile time grows faster than the length (a literal of 1 MB takes minutes)."""

MAX_NESTING = 64
"""Bound on nested JSON values, or on open parentheses: time and memory grow with the cube of the depth, and an anyOf
nested 1,000 deep ends the process."""

MAX_ENUM_VALUES = 2048
"""Bound on one ``enum`` and on ``choice``: compiling slows down by a factor of ten between 4,500 and 5,000 values."""

MAX_REFERENCES = 512
"""Bound on distinct ``$ref`` targets: a chain of 2,000 takes 5 s to compile, one of 5,000 ends the process."""

MAX_PROPERTIES = 1024
"""Bound on the properties of one object: with 1,000 optional ones a compile takes 10 s in one engine."""

MAX_BRANCHES = 512
"""Bound on one ``anyOf``, ``oneOf`` or ``allOf``."""

MAX_WHITESPACE = 256
"""Bound on ``max_whitespace``."""

MAX_DEFAULT_BOUND = 4096
"""Bound on ``max_string_length`` and ``max_items``."""

_MAX_SIZES: Mapping[str, int] = {
    "enum": MAX_ENUM_VALUES,
    "properties": MAX_PROPERTIES,
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "prefixItems"), MAX_BRANCHES),
}
_WRAPPER_KEYS = frozenset({"name", "description", "schema", "strict"})
_EXCERPT_LENGTH = 80
_RULE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_REGEX_SPANS: Mapping[str, str] = {"[": "]"}
_EBNF_SPANS: Mapping[str, str] = {"[": "]", '"': '"', "#": "\n"}
_JSON_OBJECT_SOURCE = '{"type":"object"}'


class GrammarError(ValueError):
    """A request's grammar is malformed or beyond a bound.

    Args:
        param: The request field at fault.
        message: What is wrong with it; ``str()`` puts the field in front.
    """

    def __init__(self, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.param = param


class GrammarOptions(msgspec.Struct, frozen=True):
    """How a grammar is to be enforced.

    Attributes:
        strict: Refuse what cannot be enforced, rather than running without it.
        any_whitespace: Allow blanks and line ends between JSON tokens; else one form, ``", "`` and ``": "``.
        max_whitespace: How many of them may stand between two JSON tokens.
        max_string_length: Bound on JSON strings that their schema leaves unbounded, in characters; None for no bound.
        max_items: Bound on JSON arrays that their schema leaves unbounded, in items; None for no bound.
        root_rule: Where an EBNF starts.
    """

    strict: bool = True
    any_whitespace: bool = True
    max_whitespace: int = DEFAULT_MAX_WHITESPACE
    max_string_length: int | None = None
    max_items: int | None = None
    root_rule: str = "root"


class GrammarSpec(msgspec.Struct, frozen=True):
    """A request's grammar.

    Attributes:
        kind: Which language ``source`` is in.
        source: Canonical text: a schema as compact JSON in its canonical form (for json_object too), a choice as a
            compact JSON list, a regex or an EBNF as given.
        options: How it is to be enforced.
    """

    kind: GrammarKind
    source: str
    options: GrammarOptions = GrammarOptions()


def parse_grammar(fields: Mapping[str, object]) -> GrammarSpec | None:
    """Returns the grammar that a request's fields ask for, or None when they ask for none.

    Fields that are absent or None do not count, nor does ``json_object: false``; other fields are not looked at.

    Args:
        fields: ``json_schema`` (dict, bool, or JSON text of one), ``json_object`` (bool), ``regex`` (str), ``ebnf``
            (str with a rule named root), ``choice`` (list of different, non-empty str), ``structural_tag`` (dict, or
            JSON text of one); and the options: ``strict``, ``any_whitespace`` (bool, default true),
            ``max_whitespace``, ``max_string_length``, ``max_items`` (int), ``ebnf_root`` (str).

    Raises:
        GrammarError: A field is malformed or beyond a bound, or more than one grammar is given.
    """
    options = _parse_options(fields)
    wants_object = _parse_bool("json_object", fields.get("json_object"), default=False)
    given = [
        name for name in GRAMMAR_FIELDS if fields.get(name) is not None and (name != "json_object" or wants_object)
    ]
    if not given:
        return None
    if len(given) > 1:
        raise GrammarError(given[1], f"given together with {given[0]}; a request takes at most one grammar")
    value = fields[given[0]]
    return GrammarSpec(given[0], _source(given[0], value), options)


def _source(kind: GrammarKind, value: object) -> str:
    match kind:
        case "json_schema":
            return _schema_source(value)
        case "json_object":
            return _JSON_OBJECT_SOURCE
        case "regex" | "ebnf":
            return _text_source(kind, value)
        case "choice":
            return _choice_source(value)
        case "structural_tag":
            return _tag_source(value)


def _parse_options(fields: Mapping[str, object]) -> GrammarOptions:
    root_rule = fields.get("ebnf_root")
    if root_rule is not None and (not isinstance(root_rule, str) or not _RULE_NAME.fullmatch(root_rule)):
        raise GrammarError("ebnf_root", f"got {_excerpt(root_rule)}, expected the name of a rule")
    max_whitespace = _parse_count("max_whitespace", fields.get("max_whitespace"), 0, MAX_WHITESPACE)
    return GrammarOptions(
        strict=_parse_bool("strict", fields.get("strict"), default=True),
        any_whitespace=_parse_bool("any_whitespace", fields.get("any_whitespace"), default=True),
        max_whitespace=DEFAULT_MAX_WHITESPACE if max_whitespace is None else max_whitespace,
        max_string_length=_parse_count("max_string_length", fields.get("max_string_length"), 1, MAX_DEFAULT_BOUND),
        max_items=_parse_count("max_items", fields.get("max_items"), 1, MAX_DEFAULT_BOUND),
        root_rule="root" if root_rule is None else root_rule,
    )


def _parse_count(param: str, value: object, least: int, most: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise GrammarError(param, f"got {_excerpt(value)}, expected an integer from {least} to {most}")
    return value


def _parse_bool(param: str, value: object, *, default: bool) -> bool:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise GrammarError(param, f"got {_excerpt(value)}, expected true or false")
    return value


def _text_source(param: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise GrammarError(param, f"got {_excerpt(value)}, expected a non-empty string")
    _check_text(param, value)
    _check_no_nul(param, value)
    _check_size(param, value)
    _check_parentheses(param, value, _EBNF_SPANS if param == "ebnf" else _REGEX_SPANS)
    return value


def _choice_source(value: object) -> str:
    if not isinstance(value, list | tuple) or not value:
        raise GrammarError("choice", f"got {_excerpt(value)}, expected a non-empty list of strings")
    if len(value) > MAX_ENUM_VALUES:
        raise GrammarError("choice", f"has {len(value)} strings, at most {MAX_ENUM_VALUES} are allowed")
    first_index: dict[str, int] = {}
    for index, text in enumerate(value):
        if not isinstance(text, str) or not text:
            raise GrammarError("choice", f"[{index}] is {_excerpt(text)}, expected a non-empty string")
        _check_text("choice", text, place=f"[{index}] ")
        _check_no_nul("choice", text, place=f"[{index}] ")
        if text in first_index:
            raise GrammarError("choice", f"[{index}] repeats [{first_index[text]}], {_excerpt(text)}")
        first_index[text] = index
    return _check_size("choice", _compact_json("choice", list(value)))


def _schema_source(value: object) -> str:
    schema = _parse_json("json_schema", value) if isinstance(value, str) else value
    if not isinstance(schema, bool | dict):
        raise GrammarError("json_schema", f"got {_excerpt(value)}, expected a JSON Schema: an object, true or false")
    if schema is False:
        raise GrammarError("json_schema", "the schema false allows no value at all")
    if isinstance(schema, dict):
        _check_no_wrapper(schema)
    references: set[str] = set()
    for path, depth, key, item in _walk("json_schema", "", 1, "", schema):
        if depth > MAX_NESTING:
            raise GrammarError("json_schema", f"nested deeper than {MAX_NESTING} at {_excerpt(path)}")
        _check_scalar("json_schema", path, item)
        bound = _MAX_SIZES.get(key)
        if bound is not None and isinstance(item, list | dict) and len(item) > bound:
            raise GrammarError("json_schema", f"{path} has {len(item)} entries, at most {bound} are allowed")
        if key == "pattern" and isinstance(item, str):
            _check_no_nul("json_schema", item, place=f"{path} ")
        if key == "$ref" and isinstance(item, str):
            references.add(item)
    if len(references) > MAX_REFERENCES:
        raise GrammarError("json_schema", f"has {len(references)} $ref targets, at most {MAX_REFERENCES} are allowed")
    return _check_size("json_schema", _compact_json("json_schema", canonical_schema(schema)))


def _check_no_wrapper(schema: dict[str, object]) -> None:
    """Refuses the wrappers of OpenAI's ``response_format``: as a schema they would allow any value, or mean nothing."""
    if (
        schema.keys() <= _WRAPPER_KEYS
        and isinstance(schema.get("schema"), dict)
        and isinstance(schema.get("name"), str)
    ):
        raise GrammarError("json_schema", "this is the wrapper {name, schema, strict}; give what stands under schema")
    if schema.get("type") == "json_schema" and isinstance(schema.get("json_schema"), dict):
        raise GrammarError(
            "json_schema", "this is the wrapper {type, json_schema}; give what stands under json_schema, then schema"
        )


def _tag_source(value: object) -> str:
    tag = _parse_json("structural_tag", value) if isinstance(value, str) else value
    if not isinstance(tag, dict):
        raise GrammarError("structural_tag", f"got {_excerpt(value)}, expected a JSON object")
    for path, depth, key, item in _walk("structural_tag", "", 1, "", tag):
        if depth > MAX_NESTING:
            raise GrammarError("structural_tag", f"nested deeper than {MAX_NESTING} at {_excerpt(path)}")
        _check_scalar("structural_tag", path, item)
        if key == "grammar" and isinstance(item, str):
            _check_parentheses("structural_tag", item, _EBNF_SPANS, place=f"{path} has ")
    if not isinstance(tag.get("format"), dict) and not (tag.get("structures") and tag.get("triggers")):
        raise GrammarError("structural_tag", 'has neither an object "format" nor non-empty "structures" and "triggers"')
    return _check_size("structural_tag", _compact_json("structural_tag", tag))


def _parse_json(param: str, text: str) -> object:
    _check_text(param, text)
    _check_size(param, text)
    try:
        return parse_json(text)
    except DuplicateKeyError as error:
        raise GrammarError(param, str(error)) from None
    except json.JSONDecodeError as error:
        raise GrammarError(param, f"is no JSON: {error}") from None
    except RecursionError:
        raise GrammarError(param, f"nested deeper than {MAX_NESTING}") from None
    except ValueError as error:
        raise GrammarError(param, f"has a number that cannot be read: {error}") from None


def _walk(param: str, path: str, depth: int, key: str, value: object) -> Iterator[tuple[str, int, str, object]]:
    """Yields (JSON pointer, nesting depth, last key, value) of all values inside one, itself first, without recursion.

    Values below ``MAX_NESTING`` + 1 are not visited, so that a value that contains itself ends too.
    """
    stack = [(path, depth, key, value)]
    while stack:
        path, depth, key, value = stack.pop()
        yield path or "the whole", depth, key, value
        if depth > MAX_NESTING:
            continue
        if isinstance(value, dict):
            for name, item in value.items():
                if not isinstance(name, str):
                    raise GrammarError(param, f"{path or 'the whole'} has the key {_excerpt(name)}, expected a string")
                _check_text(param, name, place=f"a key of {path or 'the whole'} ")
                stack.append((f"{path}/{name}", depth + 1, name, item))
        elif isinstance(value, list | tuple):
            stack.extend((f"{path}/{index}", depth + 1, "", item) for index, item in enumerate(value))


def _check_scalar(param: str, path: str, value: object) -> None:
    if isinstance(value, str):
        _check_text(param, value, place=f"{path} ")
    elif isinstance(value, float) and not math.isfinite(value):
        raise GrammarError(param, f"{path} is {value}, expected a finite number")
    elif value is not None and not isinstance(value, bool | int | float | dict | list | tuple):
        raise GrammarError(param, f"{path} is a {type(value).__name__}, expected a JSON value")


def _check_text(param: str, text: str, *, place: str = "") -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = f"U+{ord(text[error.start]):04X}"
        raise GrammarError(param, f"{place}has the lone surrogate {surrogate} at position {error.start}") from None


def _check_no_nul(param: str, text: str, *, place: str = "") -> None:
    position = text.find("\0")
    if position >= 0:
        raise GrammarError(param, f"{place}has a NUL character at position {position}, which no grammar may have")


def _check_size(param: str, source: str) -> str:
    size_bytes = len(source.encode())
    if size_bytes > MAX_SOURCE_BYTES:
        raise GrammarError(param, f"has {size_bytes} bytes, at most {MAX_SOURCE_BYTES} are allowed")
    return source


def _compact_json(param: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise GrammarError(param, f"cannot be written as JSON: {error}") from None


def _check_parentheses(param: str, text: str, spans: Mapping[str, str], *, place: str = "") -> None:
    depth = _parenthesis_depth(text, spans)
    if depth > MAX_NESTING:
        raise GrammarError(param, f"{place}parentheses nested {depth} deep, at most {MAX_NESTING} are allowed")


def _parenthesis_depth(text: str, spans: Mapping[str, str]) -> int:
    """Returns how deep parentheses nest, not counting escaped ones and those inside ``spans`` (opening to closing)."""
    depth = deepest = 0
    closing = ""
    escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif closing:
            closing = "" if character == closing else closing
        elif character in spans:
            closing = spans[character]
        elif character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == ")":
            depth -= 1
    return deepest


def _excerpt(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}…"
