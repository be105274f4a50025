"""What ranks need that takes time to make and is the same for all: made in their zygote, or by a rank that has none."""

from __future__ import annotations

import os
from dataclasses import dataclass

from grammar_sync.engines.backend import GrammarBackend
from grammar_sync.engines.factory import make_backend
from grammar_sync.reasoning import ReasoningVocabulary
from grammar_sync.vetting.warm_backend import WarmBackend, warm_up
from grammar_sync.vocabulary import GrammarVocabulary
from launch.commands import BenchDecodeCommand, GenerateCommand, RankCommand, ServeCommand
from launch.options import EngineOptions
from launch.rank.invariant_start import prepare_kernels
from runtime.assembly import grammar_vocabulary
from runtime.checkpoint import Checkpoint, open_checkpoint
from runtime.model_config import ModelConfig
from runtime.thinking import reasoning_of
from runtime.thinking_fields import marker_pair
from runtime.tokenizer import Tokenizer
from sampler.processor_names import named_processors

EngineCommand = GenerateCommand | ServeCommand | RankCommand | BenchDecodeCommand
"""Commands whose ranks are an engine's."""


@dataclass(frozen=True)
class FirstStageParts:
    """What only ranks of the first stage hold.

    Args:
        tokenizer: The model's.
        eos_token_ids: What ends an output: the union of tokenizer, generation and model configuration.
        vocabulary: What grammars are compiled for.
        reasoning: How the model thinks; None when it does not.
        backend: Compiles grammars.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    vocabulary: GrammarVocabulary
    reasoning: ReasoningVocabulary | None
    backend: GrammarBackend

    @classmethod
    def load(cls, options: EngineOptions, config: ModelConfig) -> FirstStageParts:
        """Returns what the model's files say; it starts no thread.

        Raises:
            ValueError: A file or option is wrong; a TokenizerError, a VocabularyError or a class beside them.
        """
        tokenizer = Tokenizer.load(options.model)
        eos_token_ids = tuple(sorted({*tokenizer.eos_token_ids, *config.eos_token_ids}))
        vocabulary = grammar_vocabulary(tokenizer, config, eos_token_ids)
        named = marker_pair(options.reasoning_start_marker, options.reasoning_marker)
        reasoning = reasoning_of(tokenizer, vocabulary, named)
        return cls(tokenizer, eos_token_ids, vocabulary, reasoning, make_backend(vocabulary, options.grammar_backend))


@dataclass
class PreparedEngine:
    """What the processes of a run's ranks are forked with.

    Args:
        command: What they are to run.
        checkpoint: The model's files, opened.
        processors: Where logit processors are, by name; each process loads their code for itself.
        first_stage: None in a rank of a later stage that is up.
    """

    command: EngineCommand
    checkpoint: Checkpoint
    processors: dict[str, str]
    first_stage: FirstStageParts | None

    @classmethod
    def make(cls, command: EngineCommand) -> PreparedEngine:
        """Returns it ready for forks: no thread is started, and no device touched.

        Raises:
            ValueError: As ``FirstStageParts.load``, ``open_checkpoint`` and ``named_processors`` do.
        """
        options = command.engine
        checkpoint = open_checkpoint(options.model)
        first_stage = FirstStageParts.load(options, checkpoint.config)
        warm_up(first_stage.backend)
        if options.invariant and options.device != "cuda":
            prepare_kernels(os.environ)
        return cls(command, checkpoint, named_processors(options.logit_processors), first_stage)

    def drop_first_stage(self) -> None:
        """Forgets, in a rank of a later stage, what only ranks of the first hold."""
        self.first_stage = None

    def engines(self) -> WarmBackend | None:
        """Returns the grammar engines for a compile process that is forked from here."""
        parts, policy = self.first_stage, self.command.engine.grammar_backend
        return None if parts is None else WarmBackend(parts.backend, parts.vocabulary, policy)
