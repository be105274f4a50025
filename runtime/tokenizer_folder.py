"""A tokenizer from a Hugging Face folder.

``tokenizer.json`` says how text is cut and whether BOS is added; as in transformers 5, ``add_bos_token`` elsewhere
changes nothing. The other files name special tokens and hold the chat template; ``generation_config.json`` and
``config.json`` add their end-of-sequence ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from runtime.tokenizer_parts import TokenizerFileError, TokenizerParts, library_errors_in

TOKENIZER_FILE: Final = "tokenizer.json"
_CONFIG_FILE: Final = "tokenizer_config.json"
_SPECIAL_TOKENS_FILE: Final = "special_tokens_map.json"
_EOS_FILES: Final = ("generation_config.json", "config.json")
_TEMPLATE_FILE: Final = "chat_template.jinja"
_TEMPLATE_FOLDER: Final = "additional_chat_templates"
_NAMES: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LIST_NAMES: Final = ("additional_special_tokens", "extra_special_tokens")


def read_tokenizer_folder(folder: Path) -> TokenizerParts:
    """Returns the tokenizer of a Hugging Face folder.

    Raises:
        OSError: A file cannot be read.
        TokenizerFileError: A file is not what it should be; the message begins with the file's name.
    """
    _read_object(folder / TOKENIZER_FILE)
    with library_errors_in(TOKENIZER_FILE):
        backend = Backend.from_file(str(folder / TOKENIZER_FILE))
    backend.no_truncation()
    backend.no_padding()
    config = _read_object(folder / _CONFIG_FILE)
    if "added_tokens_decoder" not in config:
        # An older layout, which names the special tokens in a file of their own.
        config |= _read_object(folder / _SPECIAL_TOKENS_FILE)
    _add_missing_tokens(backend, config)
    named_tokens = {name: token.content for name in _NAMES if (token := _as_token(config.get(name), name)) is not None}
    eos_token_ids = [token_id for name in _EOS_FILES for token_id in _eos_ids(folder / name)]
    if "eos_token" in named_tokens:
        eos_token_ids += _ids_of(backend, named_tokens["eos_token"])
    return TokenizerParts(backend, eos_token_ids, named_tokens, _read_chat_templates(folder, config))


def _read_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, an empty one where there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerFileError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerFileError(f"{path.name} must hold a JSON object, got {type(value).__name__}")
    return value


def _as_token(value: object, name: str) -> AddedToken | None:
    """Returns the special token that a configuration spells as a string or as an object with its flags."""
    if value is None:
        return None
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        flags = {flag: bool(value.get(flag, False)) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
        return AddedToken(value["content"], special=bool(value.get("special", True)), **flags)
    raise TokenizerFileError(f"{_CONFIG_FILE}: {name} must be a string or an object with content, got {value!r}")


def _add_missing_tokens(backend: Backend, config: dict[str, Any]) -> None:
    """Adds the tokens that the configuration names and ``tokenizer.json`` does not list as added tokens."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise TokenizerFileError(f"{_CONFIG_FILE}: added_tokens_decoder must be an object, got {type(listed).__name__}")
    candidates = [_as_token(listed[key], f"added_tokens_decoder[{key}]") for key in sorted(listed, key=_by_number)]
    candidates += [_as_token(config.get(name), name) for name in _NAMES]
    for name in _LIST_NAMES:
        extra = config.get(name) or []
        tokens = extra.values() if isinstance(extra, dict) else extra
        candidates += [_as_token(token, name) for token in tokens]
    for token in candidates:
        if token is not None and token.content not in known:
            known.add(token.content)
            add = backend.add_special_tokens if token.special else backend.add_tokens
            add([token])


def _ids_of(backend: Backend, token: str) -> list[int]:
    token_id = backend.token_to_id(token)
    return [] if token_id is None else [token_id]


def _by_number(key: str) -> int:
    if not key.isdecimal():
        raise TokenizerFileError(f"{_CONFIG_FILE}: added_tokens_decoder has the key {key!r}, must be a token id")
    return int(key)


def _eos_ids(path: Path) -> list[int]:
    value = _read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TokenizerFileError(
                f"{path.name}: eos_token_id must be an id of at least 0 or a list of them, got {value!r}"
            )
    return ids


def _read_chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Returns the templates by name; files win over the configuration."""
    files = {"default": folder / _TEMPLATE_FILE}
    files |= {path.stem: path for path in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))}
    templates = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.exists()}
    if templates:
        return templates
    value = config.get("chat_template")
    if value is None:
        return {}
    entries = [{"name": "default", "template": value}] if isinstance(value, str) else value
    try:
        templates = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError) as error:
        raise TokenizerFileError(
            f"{_CONFIG_FILE}: chat_template must be a string or a list of name and template"
        ) from error
    if not all(isinstance(text, str) for text in (*templates, *templates.values())):
        raise TokenizerFileError(f"{_CONFIG_FILE}: the names and texts of chat_template must be strings")
    return templates
