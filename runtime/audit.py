"""The audit: every rank of the last stage also draws by itself, and what the stage agreed on must be the same.

Each rank computes the logits of all slices, slice by slice in the shapes their owners use, and draws without the
others. The draw does not depend on tp_size, so a difference means that a rank computed, held or exchanged something
wrong. It costs an LM head and its product for the whole vocabulary on every rank, and masks gathered whole: it is for
finding a sick device, not for every day.
"""

from __future__ import annotations

import torch

from runtime.model_config import ModelConfig
from runtime.plan import StepPlan
from sampler.batch import SamplingBatchInfo
from sampler.processors import ProcessorRegistry
from sampler.sampler import Sampler
from tp.embedding import ParallelLMHead
from tp.group import TensorParallelGroup
from tp.partition import VocabularyBlocks


class AuditError(RuntimeError):
    """What the stage agreed on is not what this rank draws by itself: one of its ranks computes wrong numbers."""


class Auditor:
    """One rank's check.

    Args:
        config: The model.
        heads: The LM head of every slice, in rank order.
        group: The stage.
        processors: The logit processors that requests may name.
    """

    def __init__(
        self,
        config: ModelConfig,
        heads: list[ParallelLMHead],
        group: TensorParallelGroup,
        processors: ProcessorRegistry | None,
    ) -> None:
        blocks = VocabularyBlocks(config.vocab_size)
        self._heads = heads
        self._group = group
        self._widths = [blocks.slice_of(rank, group.size).size // 32 for rank in range(group.size)]
        self._sampler = Sampler(
            TensorParallelGroup(0, 1, name=f"audit of {group.name}"),
            vocab_size=config.vocab_size,
            slice_start=0,
            block_length=blocks.block_length,
            processors=processors,
        )

    def draw(
        self,
        rows: torch.Tensor,
        info: SamplingBatchInfo,
        positions: list[int],
        mask_words: torch.Tensor | None,
    ) -> torch.Tensor:
        """Returns what this rank draws by itself, [B] int64; all ranks of the stage call it.

        Args:
            rows: [B, D], what the LM head takes.
            info: The rows' parameters.
            positions: How many tokens each row has generated so far.
            mask_words: [B, own words] int32, this rank's slice of the masks; None when no row has one.
        """
        logits = torch.cat([head(rows) for head in self._heads], dim=1)
        return self._sampler.sample(logits, info, positions, self._whole_masks(mask_words)).token_ids

    def compare(self, plan: StepPlan, own: torch.Tensor, agreed: list[int]) -> None:
        """Does nothing if this rank draws what was agreed.

        Raises:
            AuditError: It does not; rank, step, row and both ids are named.
        """
        for row, (mine, theirs) in enumerate(zip(own.tolist(), agreed, strict=True)):
            if mine != theirs:
                sequence_id = plan.sampling_rows[row].sequence_id
                raise AuditError(
                    f"audit on {self._group.name} rank {self._group.rank}, step {plan.step}, row {row} (sequence "
                    f"{sequence_id}): the stage agreed on token {theirs}, this rank draws {mine}"
                )

    def _whole_masks(self, mask_words: torch.Tensor | None) -> torch.Tensor | None:
        if mask_words is None:
            return None
        padded = torch.nn.functional.pad(mask_words, (0, max(self._widths) - mask_words.shape[1]))
        gathered = self._group.all_gather(padded)
        return torch.cat([gathered[rank][:, :width] for rank, width in enumerate(self._widths)], dim=1)
