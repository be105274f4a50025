"""Who is out of step: the ranks' digests of the same step beside each other.

Needs neither torch nor the ranks' help.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.node.progress_record import DigestKind, ProgressRecord

RankDigests = Mapping[DigestKind, Mapping[int, int]]
"""What one rank keeps: digests by step, for each kind."""

_DIGEST_MASK = (1 << 64) - 1
_WHAT = {
    DigestKind.STATE: "all that was planned and committed before step",
    DigestKind.PLAN: "the plan of step",
    DigestKind.MASKS: "the grammar masks of step",
    DigestKind.AUDIT: "the audit (1: weights changed, 2: wrong products, else: other hidden states) before step",
}


@dataclass(frozen=True)
class Disagreement:
    """The first step in which not all ranks have the same digest.

    Args:
        kind: What the digests are of.
        step: The step.
        ranks_of: Who has which digest; the digest that most ranks have first, of equals that of the lowest rank.
    """

    kind: DigestKind
    step: int
    ranks_of: Mapping[int, tuple[int, ...]]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks that differ from the majority, in order; nobody where there is no majority.

        An audit itself tells who is well.
        """
        if self.kind is DigestKind.AUDIT:
            return tuple(sorted(rank for digest, ranks in self.ranks_of.items() if digest for rank in ranks))
        majority, *others = self.ranks_of.values()
        odd = sorted(rank for ranks in others for rank in ranks)
        return tuple(odd) if len(majority) > len(odd) else ()

    @property
    def suspects(self) -> tuple[int, ...]:
        """The ranks of which some must be wrong, in order: the culprits, or all where there is no majority."""
        return self.culprits or tuple(sorted(rank for ranks in self.ranks_of.values() for rank in ranks))

    def sentence(self) -> str:
        """Returns it in one line."""
        sides = ", ".join(
            f"{_ranks(ranks)} {digest & _DIGEST_MASK:016x}"
            for digest, ranks in sorted(self.ranks_of.items(), key=_lowest)
        )
        found = f"{_ranks(self.culprits)} out of step" if self.culprits else f"{_ranks(self.suspects)} differ"
        return f"{found}: of {_WHAT[self.kind]} {self.step} the digests are: {sides}"


def first_disagreement(digests: Mapping[int, RankDigests]) -> Disagreement | None:
    """Returns where the ranks' ways part; None where nothing that two ranks kept differs.

    A step counts as soon as two ranks kept a digest of it; one that did not come so far has no say.

    Args:
        digests: What each rank kept, by global rank.
    """
    found = []
    for kind in DigestKind:
        values: dict[int, dict[int, list[int]]] = {}
        for rank, kept in sorted(digests.items()):
            for step, digest in kept.get(kind, {}).items():
                values.setdefault(step, {}).setdefault(digest, []).append(rank)
        # In the order in which a step has them.
        found += [(step, kind, ranks_of) for step, ranks_of in values.items() if _differ(kind, ranks_of)]
    if not found:
        return None
    step, kind, ranks_of = min(found, key=lambda one: one[:2])
    ordered = sorted(ranks_of.items(), key=lambda item: (-len(item[1]), item[1]))
    return Disagreement(kind, step, {digest: tuple(ranks) for digest, ranks in ordered})


def kept_digests(record: ProgressRecord) -> RankDigests:
    """Returns what a rank's record keeps."""
    return {kind: record.digests(kind) for kind in DigestKind}


def _differ(kind: DigestKind, ranks_of: Mapping[int, Sequence[int]]) -> bool:
    return len(ranks_of) > 1 or (kind is DigestKind.AUDIT and any(ranks_of))


def _lowest(item: tuple[int, tuple[int, ...]]) -> int:
    return item[1][0]


def _ranks(ranks: tuple[int, ...]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"
