"""``lockstep bench sampler`` over real ranks."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import LOCKSTEP, run

from launch.exit_codes import ExitCode


def test_real_ranks_count_their_bytes(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    options = ["--tp", "2", "--batch", "2", "--vocab", "20000", "--repeats", "1", "--cases", "greedy,top_p_flat"]
    result = run(*LOCKSTEP, "bench", "sampler", *options, "--json", str(path))
    assert result.returncode == 0, result.stderr
    assert "top_p_flat" in result.stdout
    document = json.loads(path.read_bytes())
    assert document["tp"] == 2
    for case in document["cases"]:
        traffic = case["traffic"]
        assert case["ratios"]["of_full_gather"] < 0.2
        assert traffic["full_gather_bytes"] == 2 * 20_000 * 4 // 2
        assert all(count > 0 for _, count in traffic["collectives"])
    missing = run(*LOCKSTEP, "bench", "sampler", "--json", str(tmp_path / "no" / "folder.json"))
    assert missing.returncode == ExitCode.USAGE
    assert "--json" in missing.message
