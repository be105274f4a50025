"""A grammar engine for compile processes under test: what a grammar's source says is what happens in the process."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from grammar_sync.engines.backend import Matcher
from grammar_sync.engines.prepared import CompileError, PreparedGrammar
from grammar_sync.spec import GrammarSpec
from grammar_sync.vocabulary import GrammarVocabulary

MAKE = "faulty_engine:FaultyEngine"


class AnyToken:
    """A matcher that allows everything, quickly or not."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._taken: list[int] = []

    def accept(self, token_id: int) -> bool:
        self._taken.append(token_id)
        return self._source != "refuses what it allows"

    def is_terminated(self) -> bool:
        return False

    def fill(self, words: torch.Tensor) -> None:
        if self._source == "slow mask":
            burn(0.15)
        elif self._source == "endless mask":
            burn(3600)
        elif self._source == "dead end" and self._taken:
            words.zero_()

    def rollback(self, count: int) -> None:
        del self._taken[len(self._taken) - count :]

    def copy(self) -> Matcher:
        return AnyToken(self._source)

    def jump_forward(self) -> str:
        return ""


class Compiled:
    size_bytes = 1000

    def __init__(self, source: str) -> None:
        self._source = source

    def new_matcher(self) -> Matcher:
        return AnyToken(self._source)


def burn(seconds: float) -> None:
    """Uses so much CPU."""
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def do_nothing(*_: str) -> None:
    """Is what happens for most grammars."""


def refuse(*_: str) -> None:
    raise CompileError("no such grammar")


def run_out_of_memory() -> None:
    raise CompileError("std::bad_alloc")


def allocate() -> None:
    kept = [bytearray(16 << 20) for _ in range(1 << 20)]
    raise AssertionError(len(kept))


def break_down() -> None:
    raise KeyError("broken")


def make_noise() -> None:
    os.write(1, b"noise\n")
    os.write(2, b"noise\n")


def talk_nonsense() -> None:
    """Writes what is no message into every file of the process."""
    for descriptor in range(3, 64):
        with suppress(OSError):
            os.write(descriptor, b"\x00\x00\x00\x02\xc1\xc1")


FAULTS: Mapping[str, Callable[..., object]] = {
    "bad": refuse,
    "segv": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "broken": break_down,
    "sleep": lambda: time.sleep(3600),
    "burn": lambda seconds: burn(float(seconds)),
    "allocate": allocate,
    "bad_alloc": run_out_of_memory,
    "noise": make_noise,
    "nonsense": talk_nonsense,
}


class FaultyEngine:
    """Knows one spec: its forms, separated by " | ", the second of which is said to be for the other engine.

    A form may begin with "mark PATH " to leave a line with its process id in a file.
    """

    def __init__(self, vocabulary: GrammarVocabulary, policy: str) -> None:
        self.made_for = (vocabulary, policy)

    def prepare(self, spec: GrammarSpec) -> tuple[PreparedGrammar, ...]:
        if spec.source == "unprepared":
            raise CompileError("cannot be prepared")
        if spec.source == "endless preparation":
            burn(3600)
        first, *others = spec.source.split(" | ")
        forms = [PreparedGrammar("xgrammar", "regex", first, spec.options)]
        return (*forms, *(PreparedGrammar("llguidance", "regex", other, spec.options) for other in others))

    def compile(self, prepared: PreparedGrammar) -> Compiled:
        words = prepared.source.split()
        if words[0] == "mark":
            with Path(words[1]).open("a") as file:
                file.write(f"{os.getpid()}\n")
            words = words[2:]
        name, *arguments = words
        FAULTS.get(name, do_nothing)(*arguments)
        return Compiled(" ".join(words))
