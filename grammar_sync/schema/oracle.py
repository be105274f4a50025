"""Judges single values: whether an enumerated value is valid under the rest of its schema."""

from __future__ import annotations

import json
from typing import Any, Final
from urllib.parse import quote

import jsonschema
import referencing
import referencing.jsonschema

from grammar_sync.engines.prepared import CompileError
from grammar_sync.schema.document import Conjunction, Document, Draft, Schema
from grammar_sync.schema.old_bounds import reading_old_bounds

_ROOT: Final = "urn:lockstep:schema"
_VALIDATORS: Final[dict[Draft, Any]] = {
    4: jsonschema.Draft4Validator,
    6: jsonschema.Draft6Validator,
    7: jsonschema.Draft7Validator,
    2019: jsonschema.Draft201909Validator,
    2020: jsonschema.Draft202012Validator,
}
_SPECIFICATIONS: Final[dict[Draft, Any]] = {
    4: referencing.jsonschema.DRAFT4,
    6: referencing.jsonschema.DRAFT6,
    7: referencing.jsonschema.DRAFT7,
    2019: referencing.jsonschema.DRAFT201909,
    2020: referencing.jsonschema.DRAFT202012,
}


class Oracle:
    """Validates values against parts of a document, formats included.

    Args:
        document: The document.
        formats: Names of known formats, and whether a text is of a format.
    """

    def __init__(self, document: Document, formats: jsonschema.FormatChecker) -> None:
        specification = _SPECIFICATIONS[document.draft]
        resource = specification.create_resource(document.root.value)
        self._registry: Any = referencing.Registry().with_resource(_ROOT, resource)
        self._class = reading_old_bounds(_VALIDATORS[document.draft])
        self._formats = formats
        self._validators: dict[Schema, Any] = {}
        self._known: dict[tuple[Schema, str], bool] = {}

    def satisfies(self, value: Any, conjunction: Conjunction) -> bool:
        """Returns whether a value is what all members of a conjunction say.

        Raises:
            CompileError: The schema cannot be used.
        """
        text = json.dumps(value)
        return all(self._is_valid(schema, value, text) is positive for schema, positive in conjunction)

    def _is_valid(self, schema: Schema, value: Any, text: str) -> bool:
        if isinstance(schema.value, bool):
            return schema.value
        key = schema, text
        if key not in self._known:
            validator = self._validators.get(schema)
            if validator is None:
                reference = {"$ref": f"{_ROOT}#{quote(schema.path)}"}
                validator = self._class(reference, registry=self._registry, format_checker=self._formats)
                self._validators[schema] = validator
            try:
                self._known[key] = validator.is_valid(value)
            except RecursionError as error:
                raise CompileError(f"{schema.path or 'the schema'} refers to itself without end") from error
            except (referencing.exceptions.Unresolvable, ValueError, TypeError, AttributeError) as error:
                raise CompileError(f"{schema.path or 'the schema'} cannot be evaluated: {error}") from error
        return self._known[key]
