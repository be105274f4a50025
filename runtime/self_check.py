"""Now and then each rank looks at itself and at the others of its stage: has a device begun to compute wrong numbers?

What is found is a digest that is 0 where all is well, so that one look at all ranks' digests tells who is not.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from types import FunctionType

import torch

from runtime.model import DecoderStage
from runtime.plan import DesyncError
from tp.group import TensorParallelGroup

_WEIGHTS, _PRODUCT = 1, 2
_WHY = {_WEIGHTS: "its weights are not those that it loaded", _PRODUCT: "it multiplies wrong"}
_PROBE = (48, 128)
"""Rows and columns of a matrix of −1, 0 and 1: its products are whole numbers that every dtype has."""

_HASH_BYTES = 8


class SelfCheck:
    """One rank's part.

    Args:
        stage: Its layers, loaded.
        group: The stage; all its ranks check themselves in the same steps.
        every: In every how many steps.
        note: Told of what was found in a step; None when nobody wants to know.
    """

    def __init__(
        self, stage: DecoderStage, group: TensorParallelGroup, every: int, note: Callable[[int, int], None] | None
    ) -> None:
        self._group = group
        self._every = every
        self._note = note
        self._output: torch.Tensor | None = None
        self._pieces = [list(tensors_in(part)) for part in stage.parts()]
        self._loaded = [_checksum(piece) for piece in self._pieces]
        self._next = 0
        rows, columns = _PROBE
        probe = (torch.arange(rows * columns).view(rows, columns) * 7919 % 31) % 3 - 1
        self._expected = probe @ probe.T
        self._probe = probe.to(dtype=stage.dtype, device=stage.device)

    def keep(self, output: torch.Tensor) -> None:
        """Takes the stage's output of a step, equal on all its ranks, until the next one comes."""
        self._output = output

    def at(self, step: int) -> None:
        """Returns when all is well in a step that is about to begin, or not one of those that count.

        The output of the step before is compared over the stage, a product with a known result is computed, and the
        weights of one part of the stage, in turn, are compared with what was loaded.

        Raises:
            DesyncError: A rank of the stage is not well.
        """
        if step % self._every:
            return
        digests = verdict(self._group.gather_numbers([self._output_hash(), self._own_state()]))
        own = digests[self._group.rank]
        if self._note is not None:
            self._note(step, own)
        if any(digests):
            raise DesyncError(self._message(step, digests), rank=self._group.global_rank, step=step, own=own)

    def _own_state(self) -> int:
        piece, self._next = self._next, (self._next + 1) % len(self._pieces)
        if _checksum(self._pieces[piece]) != self._loaded[piece]:
            return _WEIGHTS
        product = (self._probe @ self._probe.T).to(device="cpu", dtype=torch.int64)
        return 0 if torch.equal(product, self._expected) else _PRODUCT

    def _output_hash(self) -> int:
        if self._output is None:
            return 0
        data = self._output.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return int.from_bytes(hashlib.blake2b(data, digest_size=_HASH_BYTES).digest(), "little", signed=True)

    def _message(self, step: int, digests: list[int]) -> str:
        name = self._group.name
        found = [
            f"rank {rank} of {name}: {_WHY.get(digest, 'its hidden states are not those of most others')}"
            for rank, digest in enumerate(digests)
            if digest
        ]
        return f"audit before step {step}: {'; '.join(found)}"


def verdict(found: list[list[int]]) -> list[int]:
    """Returns each rank's digest, 0 for those that are well.

    Args:
        found: By each rank of a stage: the hash of its output, and what is wrong with itself, or 0.
    """
    own = [state for _, state in found]
    if any(own):
        return own
    counted = Counter(value for value, _ in found)
    value, count = counted.most_common(1)[0]
    agreed = value if 2 * count > len(found) else None
    # A hash that happens to be what means something else would name the right rank with a wrong reason.
    return [0 if one == agreed else one or -1 for one, _ in found]


def tensors_in(thing: object) -> Iterator[torch.Tensor]:
    """Yields the tensors that an object of this program holds, in its attributes and theirs; not those of its group."""
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, TensorParallelGroup):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            yield one
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, FunctionType):
            waiting += [cell.cell_contents for cell in one.__closure__ or ()]
        elif type(one).__module__.partition(".")[0] in {"runtime", "tp"} and hasattr(one, "__dict__"):
            waiting += vars(one).values()


def _checksum(tensors: list[torch.Tensor]) -> int:
    """Returns a sum over the tensors' bits as 64-bit integers: any single bit that changes, changes it."""
    total = 0
    for number, tensor in enumerate(tensors):
        plain = (tensor.to_dense() if tensor.is_mkldnn else tensor.detach()).contiguous().flatten()
        words = plain.view(torch.int16 if plain.element_size() == 2 else torch.int32)
        if not words.storage_offset() % 4 and not words.numel() % 4:
            # The fewer, the faster.
            words = words.view(torch.int64)
        total += (number + 1) * int(words.sum(dtype=torch.int64))
    return total
