"""The folder of one run: its sockets, torchrun's logs, and what ranks say before they die.

It is made by the front side, readable by its owner only, and removed when the run is over.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from launch.node.rank_fault import FaultReport


class RankReport(msgspec.Struct, frozen=True):
    """Why a rank ended.

    Args:
        rank: Global rank.
        stage: Its pipeline stage; -1 when another process wrote the report.
        tp_rank: Its rank within the stage; -1 likewise.
        phase: ``start`` or ``run``.
        kind: The error's class.
        message: One line.
        is_consequence: Whether it only lost contact with another rank, so that the cause lies elsewhere.
        exit_code: The exit code it left with; negative = killed by that signal.
    """

    rank: int
    stage: int
    tp_rank: int
    phase: str
    kind: str
    message: str
    is_consequence: bool
    exit_code: int

    def sentence(self) -> str:
        """Returns the report as one line."""
        where = f"rank {self.rank}"
        if self.stage >= 0:
            where += f" (stage {self.stage}, tensor-parallel rank {self.tp_rank})"
        return f"{where} failed at {self.phase}: {self.message}"


@dataclass(frozen=True)
class RunFolder:
    """One run's folder."""

    path: Path

    @classmethod
    def create(cls) -> RunFolder:
        """Returns a new folder with owner-only permissions."""
        folder = cls(Path(tempfile.mkdtemp(prefix="lockstep-")))
        (folder.path / "reports").mkdir()
        (folder.path / "faults").mkdir()
        return folder

    @property
    def endpoint(self) -> str:
        """Where the client socket is bound."""
        return f"ipc://{self.path / 'client'}"

    @property
    def log_folder(self) -> Path:
        """Where torchrun may write."""
        return self.path / "torchrun"

    @property
    def grammar_folder(self) -> Path:
        """Where ranks leave what became of grammars to those that may take their place."""
        return self.path / "grammars"

    @property
    def zygote_socket(self) -> Path:
        """Where this node's zygote is asked for ranks."""
        return self.path / "zygote"

    def write_report(self, report: RankReport, *, replaces: bool = False) -> None:
        """Leaves a rank's last words; an earlier report of the rank is kept.

        When the folder is gone already, nobody is left to read them.

        Args:
            report: What to leave.
            replaces: Whether an earlier report of the rank gives way: where all ranks only say that they lost contact,
                it is judged who is to blame.
        """
        path = self.path / "reports" / f"{report.rank}.json"
        if replaces or not path.exists():
            part = path.with_suffix(".part")
            with contextlib.suppress(FileNotFoundError):
                part.write_bytes(msgspec.json.encode(report))
                part.rename(path)

    def report_of(self, rank: int) -> RankReport | None:
        """Returns a rank's last words; None when it left none."""
        path = self.path / "reports" / f"{rank}.json"
        return msgspec.json.decode(path.read_bytes(), type=RankReport) if path.exists() else None

    def forget_reports(self) -> None:
        """Removes what ranks said before they died: the next ones begin."""
        for path in (self.path / "reports").iterdir():
            path.unlink()

    def write_fault(self, number: int, report: FaultReport) -> None:
        """Leaves the report on fault ``number`` of the run, counted from 1.

        When the folder is gone already, nobody is left to read it.
        """
        path = self.path / "faults" / f"{number}.json"
        part = path.with_suffix(".part")
        with contextlib.suppress(FileNotFoundError):
            part.write_bytes(msgspec.json.encode(report))
            part.rename(path)

    def fault(self, number: int) -> FaultReport | None:
        """Returns the report on fault ``number``; None when there were not so many."""
        try:
            return msgspec.json.decode((self.path / "faults" / f"{number}.json").read_bytes(), type=FaultReport)
        except FileNotFoundError:
            return None

    def cause(self) -> RankReport | None:
        """Returns the report that names the cause: a failure of its own before one that lost contact, lowest rank."""
        reports = [
            msgspec.json.decode(path.read_bytes(), type=RankReport)
            for path in sorted((self.path / "reports").glob("*.json"))
        ]
        reports.sort(key=lambda report: (report.is_consequence, report.rank))
        return reports[0] if reports else None

    def remove(self) -> None:
        """Removes the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
