"""Runs the engine on ranks of which one changes a value that all should have alike."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from engine_ranks import Case, Watched, run_engine
from ranks import LeaveAtOnceError

from launch.node.digests import RankDigests, kept_digests
from launch.node.progress_record import ProgressRecord
from pp.link import LinkError, StageLink, Tag
from runtime.plan import DesyncError
from runtime.scheduler import Scheduler
from runtime.self_check import SelfCheck
from runtime.step_planner import StepPlanner
from sampler.sampler import Sampler
from tp.group import CollectiveError, TensorParallelGroup

_LINGER_S = 0.5


@dataclass(frozen=True)
class Corruption:
    """What one rank changes.

    ``token``: the ids that it commits; ``drop row``, ``swap rows``: its plan; ``draw``: what it samples; ``mask on the
    way``: a mask that it receives; ``skip``, ``half``: an all_reduce of its forward pass; ``weight``: a bit of its
    weights; ``output``: a number of its stage's output; ``product``: what it multiplies.
    """

    what: str
    rank: int
    at: int
    """Which opportunity it takes, from 1 on."""


@dataclass(frozen=True)
class Seen:
    """What came of a rank: what it raised, whether by itself, what it kept, and what it let go as the leader."""

    kind: str
    message: str
    is_primary: bool
    named_rank: int | None
    digests: RankDigests
    emitted: dict[int, list[int]]
    fired: int


class _Opportunity:
    """Says when it is time."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.count = 0

    def __call__(self, *, possible: bool = True) -> bool:
        self.count += possible
        return possible and self.count == self._at


@contextmanager
def corrupting(corruption: Corruption, now: _Opportunity) -> Iterator[None]:
    """Makes this process the one that is wrong."""
    target, name, wrong = _WRONG[corruption.what]
    right = getattr(target, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrong(now, right, self, *args, **kwargs)

    with mock.patch.object(target, name, method):
        yield


def _commit(now: _Opportunity, right: Callable[..., Any], self: Any, plan: Any, token_ids: Any, errors: Any) -> Any:
    if now(possible=bool(token_ids)):
        token_ids = [token_ids[0] ^ 1, *token_ids[1:]]
    return right(self, plan, token_ids, errors)


def _drop_row(now: _Opportunity, right: Callable[..., Any], self: Any) -> None:
    right(self)
    if now(possible=len(self.rows) > 1):
        self.rows.pop()


def _swap_rows(now: _Opportunity, right: Callable[..., Any], self: Any) -> None:
    right(self)
    if now(possible=len(self.rows) > 1):
        self.rows.reverse()


def _draw(now: _Opportunity, right: Callable[..., Any], self: Any, *args: Any) -> Any:
    output = right(self, *args)
    return replace(output, token_ids=output.token_ids ^ 1) if now() else output


def _mask_on_the_way(
    now: _Opportunity, right: Callable[..., Any], self: Any, stage: int, tag: Tag, **kwargs: Any
) -> Any:
    tensor = right(self, stage, tag, **kwargs)
    if now(possible=tag is Tag.MASK):
        tensor[0, -1] ^= 1 << 7
    return tensor


def _skip(now: _Opportunity, right: Callable[..., Any], self: Any, tensor: Any) -> Any:
    return tensor if now(possible=self.step > 1 and self._schedule.is_open) else right(self, tensor)


def _half(now: _Opportunity, right: Callable[..., Any], self: Any, tensor: Any) -> Any:
    is_now = now(possible=self.step > 1 and self._schedule.is_open)
    return right(self, tensor[:, : tensor.shape[1] // 2] if is_now else tensor)


def _weight(now: _Opportunity, right: Callable[..., Any], self: Any, step: int) -> Any:
    if now():
        weight = max(self._pieces[self._next], key=torch.Tensor.numel).view(-1)
        weight[-1] = torch.nextafter(weight[-1], torch.tensor(9.0))
    return right(self, step)


def _output(now: _Opportunity, right: Callable[..., Any], self: Any, output: Any) -> Any:
    if now():
        output = output.clone()
        output[-1, -1] += 1.0
    return right(self, output)


def _product(now: _Opportunity, right: Callable[..., Any], self: Any, step: int) -> Any:
    if now():
        self._probe[0, 0] += 1
    return right(self, step)


_WRONG: dict[str, tuple[type, str, Callable[..., Any]]] = {
    "token": (Scheduler, "commit", _commit),
    "drop row": (StepPlanner, "fill", _drop_row),
    "swap rows": (StepPlanner, "fill", _swap_rows),
    "draw": (Sampler, "sample", _draw),
    "mask on the way": (StageLink, "receive_tensor", _mask_on_the_way),
    "skip": (TensorParallelGroup, "all_reduce_sum_", _skip),
    "weight": (SelfCheck, "at", _weight),
    "output": (SelfCheck, "keep", _output),
    "product": (SelfCheck, "at", _product),
    "half": (TensorParallelGroup, "all_reduce_sum_", _half),
}


def run_corrupted(rank: int, world_size: int, case: Case, corruption: Corruption | None) -> Seen:
    """Runs ``case``; returns what this rank saw, whatever it was, and leaves at once."""
    watched = Watched(ProgressRecord.create())
    now = _Opportunity(0 if corruption is None else corruption.at)
    raised: Exception | None = None
    try:
        if corruption is not None and corruption.rank == rank:
            with corrupting(corruption, now):
                run_engine(rank, world_size, case, watched)
        else:
            run_engine(rank, world_size, case, watched)
    except Exception as error:
        raised = error
    is_comm = isinstance(raised, (CollectiveError, LinkError))
    seen = Seen(
        kind="" if raised is None else type(raised).__name__,
        message=str(raised),
        is_primary=raised is not None and not (is_comm and getattr(raised, "fault", "") == "backend"),
        named_rank=raised.rank if isinstance(raised, (DesyncError, CollectiveError, LinkError)) else None,
        digests=kept_digests(watched.record),
        emitted=watched.leaders[0].emitted if watched.leaders else {},
        fired=now.count,
    )
    if raised is None:
        return seen
    if seen.is_primary:
        # As a rank does: the others come to where their digests tell who is wrong.
        time.sleep(_LINGER_S)
        seen = replace(seen, digests=kept_digests(watched.record))
    raise LeaveAtOnceError(seen)


def draw_moment(seed: str, most: int) -> int:
    """Returns a moment, the same one for a seed."""
    return random.Random(seed).randint(1, most)
