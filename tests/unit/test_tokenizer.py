from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import (
    HARD_TEXTS,
    byte_level_backend,
    byte_level_keys,
    sentencepiece_keys,
    write_folder,
    write_gguf,
)
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing

from runtime.detokenizer import IncrementalDetokenizer
from runtime.tokenizer import Tokenizer, TokenizerError
from runtime.tokenizer_parts import TokenizerParts


@pytest.fixture(scope="module")
def backend() -> Backend:
    return byte_level_backend()


@pytest.fixture(scope="module")
def byte_level(backend: Backend) -> Tokenizer:
    return Tokenizer(TokenizerParts(backend, [0], {}, {}))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", sentencepiece_keys()))


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return "".join([*(detokenizer.push(token_id) for token_id in output), detokenizer.finish()])


def test_a_folder_gives_vocabulary_facts(tmp_path: Path, backend: Backend) -> None:
    tokenizer = Tokenizer.load(write_folder(tmp_path / "m", backend))
    assert tokenizer.size == backend.get_vocab_size()
    assert tokenizer.token_strings[:3] == ["<|end|>", "<|begin|>", "<|turn|>"]
    assert "Ġthe" in tokenizer.token_strings
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.vocabulary_type == "byte_level"
    assert not tokenizer.add_prefix_space
    assert tokenizer.eos_token_ids == ()


def test_end_ids_are_the_union_of_all_sources_in_ascending_order(tmp_path: Path, backend: Backend) -> None:
    folder = write_folder(
        tmp_path / "m",
        backend,
        tokenizer_config={"eos_token": {"content": "<|turn|>", "lstrip": False}},
        generation_config={"eos_token_id": [7, 2]},
        config={"eos_token_id": 0},
    )
    assert Tokenizer.load(folder).eos_token_ids == (0, 2, 7)


def test_the_special_tokens_map_names_the_end_token_too(tmp_path: Path, backend: Backend) -> None:
    folder = write_folder(tmp_path / "m", backend, special_tokens_map={"eos_token": "<|end|>"})
    assert Tokenizer.load(folder).eos_token_ids == (0,)


def test_an_end_id_beyond_the_vocabulary_is_left_out(tmp_path: Path, backend: Backend) -> None:
    folder = write_folder(tmp_path / "m", backend, config={"eos_token_id": [1, 151643]})
    assert Tokenizer.load(folder).eos_token_ids == (1,)


@pytest.mark.parametrize("flag", [True, False])
def test_bos_is_added_as_the_tokenizer_file_says_and_no_other(tmp_path: Path, flag: bool) -> None:
    config = {"bos_token": "<|begin|>", "add_bos_token": flag}
    without = Tokenizer.load(write_folder(tmp_path / "without", byte_level_backend(), tokenizer_config=config))
    plain = without.encode("hello", add_special_tokens=False)
    assert without.encode("hello") == plain

    backend = byte_level_backend()
    backend.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    tokenizer = Tokenizer.load(write_folder(tmp_path / "with", backend, tokenizer_config=config))
    assert tokenizer.encode("hello") == [1, *plain]
    assert tokenizer.encode("hello", add_special_tokens=False) == plain


def test_tokens_that_only_the_configuration_lists_are_added(tmp_path: Path, backend: Backend) -> None:
    size = backend.get_vocab_size()
    listed = {"0": {"content": "<|end|>", "special": True}, str(size): {"content": "<tool>", "special": False}}
    config = {"added_tokens_decoder": listed, "pad_token": "<pad>"}
    tokenizer = Tokenizer.load(write_folder(tmp_path / "m", backend, tokenizer_config=config))
    assert tokenizer.size == size + 2
    assert tokenizer.encode("<tool><pad>") == [size, size + 1]
    assert tokenizer.special_token_ids == {0, 1, 2, size + 1}
    assert tokenizer.decode([size, size + 1]) == "<tool>"


def test_holes_between_ids_have_an_empty_string() -> None:
    backend = Backend(WordLevel({"a": 0, "b": 3}, unk_token="a"))
    tokenizer = Tokenizer(TokenizerParts(backend, [], {}, {}))
    assert tokenizer.token_strings == ["a", "", "", "b"]
    assert (tokenizer.size, tokenizer.vocabulary_type) == (4, "raw")
    assert tokenizer.piece(1, None) == b""


def test_truncation_in_the_file_is_not_applied(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(write_folder(tmp_path / "m", backend))
    assert tokenizer.decode(tokenizer.encode("a longer text")) == "a longer text"


@pytest.mark.parametrize("text", HARD_TEXTS)
def test_decoding_gives_the_text_back(byte_level: Tokenizer, text: str) -> None:
    ids = byte_level.encode(text)
    assert byte_level.decode(ids, skip_special_tokens=False) == text
    assert streamed(byte_level, [], ids, skip=False) == text


def test_special_tokens_in_a_text_become_their_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("a<|end|>b")
    assert 0 in ids
    assert byte_level.decode(ids) == "ab"


def test_a_lone_surrogate_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        byte_level.encode("ab\ud800")


def test_ids_without_a_token_give_no_text(byte_level: Tokenizer) -> None:
    beyond = byte_level.size + 5
    assert byte_level.decode([beyond]) == ""
    assert byte_level.piece(beyond, None) == b""
    assert streamed(byte_level, [beyond], [beyond]) == ""


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_streaming_any_byte_level_ids_gives_the_decoded_text(
    byte_level: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, byte_level.size - 1), max_size=30))
    assert streamed(byte_level, [], ids, skip=skip) == byte_level.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", HARD_TEXTS)
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_sentencepiece_streams_what_it_decodes_after_any_prompt(sentencepiece: Tokenizer, text: str, cut: int) -> None:
    ids = sentencepiece.encode(text)
    prompt = ids[: cut + 1]
    assert sentencepiece.decode(ids) == text
    if not streamed(sentencepiece, [], prompt).endswith("\ufffd"):
        assert sentencepiece.decode(prompt) + streamed(sentencepiece, prompt, ids[cut + 1 :]) == text


def test_sentencepiece_drops_the_first_blank_of_a_text_and_no_other(sentencepiece: Tokenizer) -> None:
    world = sentencepiece.token_strings.index("▁world")
    assert streamed(sentencepiece, [], [world, world]) == "world world"
    assert streamed(sentencepiece, [1], [world]) == "world"
    assert streamed(sentencepiece, [world], [world]) == " world"
    assert streamed(sentencepiece, [world, 1], [world]) == " world"


def test_wrong_byte_tokens_do_not_spoil_the_characters_beside_them(sentencepiece: Tokenizer) -> None:
    ids = [3 + byte for byte in ("😀".encode() + b"\xff" + "é".encode())]
    assert streamed(sentencepiece, [], ids) == "😀\ufffdé"
    assert set(sentencepiece.decode(ids)) == {"\ufffd"}


def test_sentencepiece_facts(sentencepiece: Tokenizer) -> None:
    assert sentencepiece.vocabulary_type == "byte_fallback"
    assert sentencepiece.add_prefix_space
    assert sentencepiece.eos_token_ids == (2,)
    assert sentencepiece.special_token_ids == {0, 1, 2}
    assert sentencepiece.token_strings[3 + 10] == "<0x0A>"
    assert sentencepiece.piece(3 + 10, 5) == b"\n"


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    tokens = [sentencepiece.token_strings[i] for i in sentencepiece.encode("the world\n😀<|user|>")]
    assert tokens == ["<s>", "▁the", "▁world", "<0x0A>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<|user|>"]


def test_sentencepiece_without_a_blank_before_the_text(tmp_path: Path) -> None:
    keys = {**sentencepiece_keys(), "add_space_prefix": False, "add_bos_token": False}
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", keys))
    assert not tokenizer.add_prefix_space
    assert [tokenizer.token_strings[i] for i in tokenizer.encode("hello world")] == ["hello", "▁world"]
    world = tokenizer.token_strings.index("▁world")
    assert streamed(tokenizer, [], [world]) == tokenizer.decode([world]) == " world"


def test_words_of_a_plain_vocabulary_are_joined_as_they_are_decoded() -> None:
    backend = Backend(WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = Tokenizer(TokenizerParts(backend, [], {}, {}))
    assert tokenizer.vocabulary_type == "raw"
    assert streamed(tokenizer, [], [1, 2, 1]) == tokenizer.decode([1, 2, 1]) == "a b a"


@pytest.mark.parametrize(
    ("pre", "text", "numerals"),
    [
        (None, "x 1234", ["Ġ1234"]),
        ("default", "x 1234", ["Ġ1234"]),
        ("smollm", "x 1234", ["Ġ", "1", "2", "3", "4"]),
        ("qwen2", "x 1234", ["Ġ", "1", "2", "3", "4"]),
        ("llama-bpe", "x 1234", ["Ġ", "123", "4"]),
    ],
)
def test_a_gguf_file_names_how_text_is_split(
    tmp_path: Path, backend: Backend, pre: str | None, text: str, numerals: list[str]
) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level_keys(backend, pre)))
    splitter = tokenizer._backend.pre_tokenizer
    assert splitter is not None
    assert [word for word, _ in splitter.pre_tokenize_str(text)] == ["x", *numerals]


def test_a_gguf_file_says_whether_bos_is_added(tmp_path: Path, backend: Backend) -> None:
    def first_id(**changes: Any) -> int:
        keys = {**byte_level_keys(backend, "smollm"), **changes}
        return Tokenizer.load(write_gguf(tmp_path / "m.gguf", keys)).encode("hi")[0]

    assert first_id() != 1
    assert first_id(add_bos_token=False) != 1
    assert first_id(add_bos_token=True) == 1
    assert first_id(pre="llama-bpe") == 1
    unnamed = {key: value for key, value in byte_level_keys(backend, "smollm").items() if key != "bos_token_id"}
    assert Tokenizer.load(write_gguf(tmp_path / "m.gguf", {**unnamed, "add_bos_token": True})).encode("") == []


def test_a_gguf_file_names_several_end_ids_and_a_template(tmp_path: Path, backend: Backend) -> None:
    keys = {**byte_level_keys(backend, "qwen2"), "eos_token_id": 2, "eot_token_id": 0}
    write_gguf(tmp_path / "m.gguf", keys, "{{ bos_token }}{{ messages[0].content }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_ids == (0, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "<|begin|>hi"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not supported"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "tokenizer.ggml.merges: 'ab' is not two tokens"),
        ({"merges": ["nota token"]}, "tokenizer.ggml.merges: .*nota"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre 'unheard-of' is not supported"),
        ({"eos_token_id": 99999}, r"tokenizer.ggml.eos_token_id is 99999, must be in \[0, \d+\)"),
        ({"eos_token_id": True}, "tokenizer.ggml.eos_token_id must be of type int, got bool"),
        ({"token_type": [1]}, r"tokenizer.ggml.token_type has 1 entries for \d+ tokens"),
        ({"token_type": ["x"]}, "tokenizer.ggml.token_type must hold values of type int only"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_a_broken_gguf_file_is_named(tmp_path: Path, backend: Backend, changes: dict[str, Any], message: str) -> None:
    keys = {**byte_level_keys(backend, "smollm"), **changes}
    path = write_gguf(tmp_path / "m.gguf", {name: value for name, value in keys.items() if value is not None})
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{", "tokenizer.json is not valid JSON"),
        ("tokenizer.json", "[]", "tokenizer.json must hold a JSON object, got list"),
        ("tokenizer.json", '{"version": "1.0"}', "tokenizer.json: "),
        ("tokenizer_config.json", "nope", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token must be a string or an object with content"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "added_tokens_decoder must be an object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": "y"}}', "the key 'x', must be a token id"),
        ("tokenizer_config.json", '{"chat_template": "{% if"}', "chat template 'default' cannot be compiled"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a string or a list"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "a"}]}', "chat_template must be a string or a list"),
        ("generation_config.json", '{"eos_token_id": "2"}', "generation_config.json: eos_token_id must be an id"),
        ("config.json", '{"eos_token_id": [-1]}', "config.json: eos_token_id must be an id"),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, backend: Backend, name: str, content: str, message: str) -> None:
    folder = write_folder(tmp_path / "m", backend)
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.load(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_path_without_a_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no such file or folder"):
        Tokenizer.load(tmp_path / "absent")
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(TokenizerError, match=r"a\.gguf"):
        Tokenizer.load(tmp_path)
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"a\.gguf, b\.gguf"):
        Tokenizer.load(tmp_path)
    (tmp_path / "c.txt").write_text("x")
    with pytest.raises(TokenizerError, match=r"a model is a folder or a \.gguf file"):
        Tokenizer.load(tmp_path / "c.txt")


def test_chat_templates_come_from_the_file_before_the_configuration(tmp_path: Path, backend: Backend) -> None:
    messages = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    folder = write_folder(tmp_path / "m", backend, tokenizer_config={"chat_template": named})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.apply_chat_template(messages) == "D"
    assert tokenizer.apply_chat_template(messages, tools=[{"type": "function"}]) == "T1"
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!\n")
    assert Tokenizer.load(folder).apply_chat_template(messages) == "x!"


def test_nothing_of_the_tokenizer_needs_torch() -> None:
    code = "import json, sys, runtime.tokenizer, runtime.detokenizer; print(json.dumps('torch' in sys.modules))"
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) is False
