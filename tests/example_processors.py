"""Logit processors as a user of the project would write them, good ones and faulty ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sampler.processors import ProcessorRows


class NoRepeat:
    """Bans the ids that were generated among the last ``window`` tokens: works on slices alone."""

    needs_row_values = False

    def check(self, args: Mapping[str, Any]) -> None:
        window = args.get("window")
        if set(args) != {"window"} or not isinstance(window, int) or not 1 <= window <= 1000:
            raise ValueError(f"window must be an integer from 1 to 1000, not {window!r}")

    def process(self, rows: ProcessorRows) -> None:
        for row, (args, output_ids) in enumerate(zip(rows.args, rows.output_ids, strict=True)):
            for token_id in output_ids[-args["window"] :]:
                if 0 <= token_id - rows.slice_start < rows.logits.shape[1]:
                    rows.logits[row, token_id - rows.slice_start] = float("-inf")


class TopNSigma:
    """Bans what lies more than ``margin`` below the row's largest logit: needs that over all slices."""

    needs_row_values = True

    def check(self, args: Mapping[str, Any]) -> None:
        if not isinstance(args["margin"], (int, float)):
            raise TypeError(f"margin must be a number, not {args['margin']!r}")

    def process(self, rows: ProcessorRows) -> None:
        margins = torch.tensor([float(args["margin"]) for args in rows.args], device=rows.logits.device)
        floors = rows.max() - margins
        rows.logits.masked_fill_(rows.logits < floors.unsqueeze(1), float("-inf"))


class Normalised:
    """Subtracts the log-sum-exp, twice: what is drawn stays the same."""

    needs_row_values = True

    def check(self, args: Mapping[str, Any]) -> None:
        """Takes anything."""

    def process(self, rows: ProcessorRows) -> None:
        rows.logits.sub_(rows.logsumexp().to(torch.float32).unsqueeze(1))
        rows.logits.sub_(rows.logsumexp().to(torch.float32).unsqueeze(1))


class Faulty:
    """Fails as its arguments say, on the rank whose slice starts at ``at`` or on all."""

    def __init__(self, *, needs_row_values: bool = False) -> None:
        self.needs_row_values = needs_row_values

    def check(self, args: Mapping[str, Any]) -> None:
        """Takes anything."""

    def process(self, rows: ProcessorRows) -> None:
        how, start = rows.args[0]["how"], rows.args[0].get("at")
        rows.logits.fill_(5.0)
        here = start is None or start == rows.slice_start
        if how == "raise" and here:
            raise RuntimeError("broken")
        if how == "leave" and here:
            raise SystemExit(3)
        if how == "resize" and here:
            rows.logits.resize_(1)
        if how == "dtype" and here:
            rows.logits.data = rows.logits.data.double()
        if how == "rebind" and here:
            rows.logits = rows.logits.clone()  # type: ignore[misc]
        if how == "ask unasked":
            rows.max()
        if how == "ask other":
            _ = rows.logsumexp() if here else rows.max()
        if how == "ask once" and not here:
            rows.max()
        if how == "raise between":
            rows.max()
            if here:
                raise ValueError("half way")
            rows.logsumexp()
            rows.max()
        if how == "padding":
            rows.logits.fill_(100.0)


class FaultyRow:
    """Lowers the logits of even ids, and fails when a row's arguments say so."""

    def __init__(self, *, needs_row_values: bool) -> None:
        self.needs_row_values = needs_row_values

    def check(self, args: Mapping[str, Any]) -> None:
        """Takes anything."""

    def process(self, rows: ProcessorRows) -> None:
        for row, args in zip(rows.logits, rows.args, strict=True):
            row[::2] -= 3.0
            if args["bad"] and rows.slice_start == 0:
                raise ValueError("this row")
        if self.needs_row_values:
            rows.logits.sub_(rows.max().unsqueeze(1))


no_repeat = NoRepeat
top_n_sigma = TopNSigma()
not_a_processor = "text"


class Unfinished:
    """Has no ``process``."""

    needs_row_values = False

    def check(self, args: Mapping[str, Any]) -> None:
        """Takes anything."""


class FailsLate:
    """Fails once a row has ``after`` tokens of output."""

    needs_row_values = False

    def check(self, args: Mapping[str, Any]) -> None:
        if not isinstance(args.get("after"), int):
            raise TypeError(f"after must be an integer, not {args.get('after')!r}")

    def process(self, rows: ProcessorRows) -> None:
        for args, output_ids in zip(rows.args, rows.output_ids, strict=True):
            if len(output_ids) >= args["after"]:
                raise RuntimeError("broken")


class breaks_when_made(Unfinished):  # noqa: N801 - registered under this name
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("not today")


class _Unreadable(FailsLate):
    @property
    def needs_row_values(self) -> bool:  # type: ignore[override]
        raise RuntimeError("not today")


breaks_when_asked = _Unreadable()
