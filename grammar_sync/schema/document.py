"""A JSON Schema document: where its parts are, which draft it follows, and what its references mean.

Only what is inside the document can be referred to; nothing is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

from grammar_sync.engines.prepared import CompileError

Draft: TypeAlias = Literal[4, 6, 7, 2019, 2020]

_DRAFTS: Final[tuple[tuple[str, Draft], ...]] = (
    ("draft-03", 4),
    ("draft-04", 4),
    ("draft-06", 6),
    ("draft-07", 7),
    ("2019-09", 2019),
)
_VALUES: Final = frozenset({"enum", "const", "default", "examples"})


@dataclass(frozen=True, eq=False)
class Schema:
    """A schema in its document: one object for each place, so that identity is equality.

    Attributes:
        path: JSON pointer from the document's root.
        value: The schema itself.
        base: URI that its references are relative to.
    """

    path: str
    value: bool | dict[str, Any]
    base: str

    def get(self, keyword: str) -> Any:
        """Returns a keyword's value, or None where the schema lacks it or is true or false."""
        return self.value.get(keyword) if isinstance(self.value, dict) else None

    def present(self, keywords: tuple[str, ...]) -> list[str]:
        """Returns which of the keywords the schema has; null counts as absent but for ``const``."""
        if isinstance(self.value, bool):
            return []
        return [
            name for name in keywords if self.value.get(name) is not None or (name == "const" and name in self.value)
        ]


Member: TypeAlias = tuple[Schema, bool]
"""A schema, and whether a value must be valid (True) or invalid (False) under it."""

Conjunction: TypeAlias = tuple[Member, ...]
"""What a value must satisfy all of; empty: any value."""


def conjoin(*parts: Conjunction) -> Conjunction:
    """Returns the members of all parts, each once, in order."""
    return tuple(dict.fromkeys(member for part in parts for member in part))


def pointer(path: str, *tokens: str | int) -> str:
    """Returns ``path`` continued by keys and indices."""
    return path + "".join("/" + str(token).replace("~", "~0").replace("/", "~1") for token in tokens)


class Document:
    """A schema document.

    Args:
        root: The schema; not changed.

    Raises:
        CompileError: ``$schema`` is no text.
    """

    def __init__(self, root: bool | dict[str, Any]) -> None:
        self.draft: Draft = _draft(root)
        self._schemas: dict[str, Schema] = {}
        self._resources: dict[str, str] = {}
        self._anchors: dict[tuple[str, str], str] = {}
        self._dynamic: dict[str, list[str]] = {}
        self._bases: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        self._scan(root)
        self.root = self.at("", "")

    def at(self, path: str, keyword_path: str) -> Schema:
        """Returns the schema at a place.

        Args:
            path: JSON pointer.
            keyword_path: Where the document refers to it, for messages.

        Raises:
            CompileError: There is none.
        """
        if path not in self._schemas:
            if path not in self._values:
                raise CompileError(f"{keyword_path}: there is no schema at #{path}")
            value = self._values[path]
            if not isinstance(value, bool | dict):
                raise CompileError(f"{path or 'the schema'} is no JSON Schema: an object, true or false is expected")
            self._schemas[path] = Schema(path, value, self._bases[path])
        return self._schemas[path]

    def child(self, schema: Schema, *tokens: str | int) -> Schema:
        """Returns the schema under a keyword.

        Raises:
            CompileError: What is there is no schema.
        """
        path = pointer(schema.path, *tokens)
        return self.at(path, path)

    def resolve(self, schema: Schema, keyword: str) -> Schema:
        """Returns what ``$ref`` or its relative refers to.

        Raises:
            CompileError: It is no text, or refers to nothing in this document.
        """
        place = pointer(schema.path, keyword)
        reference = schema.get(keyword)
        if not isinstance(reference, str):
            raise CompileError(f"{place} is {reference!r}, expected a text")
        if keyword in ("$dynamicRef", "$recursiveRef"):
            self._check_static(place, reference)
        url = schema.base + reference if reference.startswith("#") else urljoin(schema.base, reference)
        address, fragment = urldefrag(url)
        fragment = unquote(fragment)
        if address not in self._resources:
            raise CompileError(f"{place} is {reference!r}: only references within the schema are resolved")
        start = self._resources[address]
        if not fragment:
            return self.at(start, place)
        if fragment.startswith("/"):
            return self.at(start + fragment, place)
        if (address, fragment) not in self._anchors:
            raise CompileError(f"{place} is {reference!r}: there is no such anchor in the schema")
        return self.at(self._anchors[address, fragment], place)

    def _check_static(self, place: str, reference: str) -> None:
        if reference == "#":
            places = [
                path for path, value in self._values.items() if isinstance(value, dict) and "$recursiveAnchor" in value
            ]
        else:
            places = self._dynamic.get(urldefrag(reference)[1], [])
        if len(places) > 1:
            raise CompileError(
                f"{place} is {reference!r}, which may mean {len(places)} places: this cannot be enforced"
            )

    def _scan(self, root: bool | dict[str, Any]) -> None:
        """Notes every value's place, every resource and every anchor, without recursion."""
        self._resources[""] = ""
        stack: list[tuple[str, Any, str, bool]] = [("", root, "", True)]
        identifier = "id" if self.draft == 4 else "$id"
        while stack:
            path, value, base, is_schema = stack.pop()
            if is_schema and isinstance(value, dict):
                base = self._enter(path, value, base, identifier)
            self._values[path] = value
            self._bases[path] = base
            if isinstance(value, dict):
                items = value.items()
                stack.extend((pointer(path, key), item, base, is_schema and key not in _VALUES) for key, item in items)
            elif isinstance(value, list):
                stack.extend((pointer(path, index), item, base, is_schema) for index, item in enumerate(value))

    def _enter(self, path: str, value: dict[str, Any], base: str, identifier: str) -> str:
        own = value.get(identifier)
        if isinstance(own, str) and not (self.draft <= 7 and "$ref" in value):
            if own.startswith("#"):
                self._anchors[base, own[1:]] = path
            else:
                base = urldefrag(urljoin(base, own))[0]
                self._resources[base] = path
        for keyword in ("$anchor", "$dynamicAnchor"):
            anchor = value.get(keyword)
            if isinstance(anchor, str):
                self._anchors[base, anchor] = path
                if keyword == "$dynamicAnchor":
                    self._dynamic.setdefault(anchor, []).append(path)
        return base


def _draft(root: bool | dict[str, Any]) -> Draft:
    named = root.get("$schema") if isinstance(root, dict) else None
    if named is not None and not isinstance(named, str):
        raise CompileError(f"/$schema is {named!r}, expected a text")
    return next((draft for name, draft in _DRAFTS if named and name in named), 2020)
