"""The model that faults are tried on when none is named: the same every time, and one that the runtime reads."""

from __future__ import annotations

from pathlib import Path

from launch.chaos.engine.tiny_model import write_tiny_model
from runtime.checkpoint import open_checkpoint
from runtime.model_config import check_parallel
from runtime.tokenizer import Tokenizer
from tp.partition import VOCABULARY_BLOCKS


def test_it_is_the_same_every_time(tmp_path: Path) -> None:
    one, other = write_tiny_model(tmp_path / "one"), write_tiny_model(tmp_path / "other")
    assert sorted(path.name for path in one.iterdir()) == sorted(path.name for path in other.iterdir())
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes()


def test_the_runtime_reads_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = open_checkpoint(folder).config
    check_parallel(config, 3, 3)
    assert config.vocab_size > VOCABULARY_BLOCKS * 32, "so that both ranks of a stage own ids"
    tokenizer = Tokenizer.load(folder)
    text = 'Größe 😀 {"a": [1]}\n\x00 end'
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert 0 <= max(ids) < config.vocab_size
    assert len(tokenizer.encode("abcd")) == 2
