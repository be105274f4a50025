"""The cases of ``lockstep bench sampler``, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Peer = Literal["argmax", "multinomial", "full_sort", "top_k"]


@dataclass(frozen=True)
class BenchCase:
    """One way to sample a whole batch.

    Attributes:
        name: What the command line calls it.
        params: The rows' sampling parameters.
        peers: What it is compared with.
        logits: ``lm``: shaped like a language model's; ``flat``: normal, three wide.
        odd_row: Parameters of the one row that has others; None = there is none.
        masked: Whether every row has a grammar mask.
        seen_ids: How many distinct ids each row has seen, for penalties.
        seeded: Whether the peer draws each row from its own stream, as Lockstep always does.
        base: Parameters of a plainer step that it is compared with too.
    """

    name: str
    params: dict[str, Any]
    peers: tuple[Peer, ...]
    logits: Literal["lm", "flat"] = "lm"
    odd_row: dict[str, Any] | None = None
    masked: bool = False
    seen_ids: int = 0
    seeded: bool = False
    base: dict[str, Any] | None = None


_TOP_K_TOP_P = {"top_k": 50, "top_p": 0.9}
_PENALTIES = {"frequency_penalty": 0.5, "presence_penalty": 0.3, "repetition_penalty": 1.2}


CASES = (
    BenchCase("greedy", {"temperature": 0.0}, ("argmax",)),
    BenchCase("greedy_mask", {"temperature": 0.0}, ("argmax",), masked=True),
    BenchCase("temperature", {}, ("multinomial",)),
    BenchCase("penalties", _PENALTIES, ("multinomial",), seen_ids=1000, base={}),
    BenchCase("logprobs", {"logprobs": 20}, ("multinomial",), base={}),
    BenchCase("top_p", {"top_p": 0.9}, ("full_sort",)),
    BenchCase("top_p_flat", {"top_p": 0.9}, ("full_sort",), logits="flat"),
    BenchCase("min_p", {"min_p": 0.05}, ("full_sort",)),
    BenchCase("top_k_top_p", _TOP_K_TOP_P, ("top_k", "full_sort")),
    BenchCase("top_k_top_p_seeded", _TOP_K_TOP_P, ("full_sort",), seeded=True),
    BenchCase("top_k_top_p_mixed", _TOP_K_TOP_P, ("full_sort",), odd_row={"top_p": 0.9}),
)


def chosen(names: tuple[str, ...]) -> tuple[BenchCase, ...]:
    """Returns the cases of these names; all when there are none."""
    return tuple(case for case in CASES if not names or case.name in names)
