"""Five minutes of 64 streams, of which some are cut and some read slowly, beside requests that are wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from http_server import Server, serving
from soak import SoakLoad, check_counters, counted, soak
from tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.sweep

SOAK_S = float(os.environ.get("LOCKSTEP_SOAK_S", "300"))
FLAT = 0.05


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=1024)
    with serving("--model", str(model), "--tp", "2", "--pp", "2", "--invariant") as started:
        yield started


@pytest.mark.timeout(SOAK_S + 400)
def test_minutes_of_mixed_streams(server: Server) -> None:
    """Counters add up, memory stays, nobody is disturbed; LOCKSTEP_SOAK_S says for how many seconds."""
    load, before = SoakLoad(), counted(server)
    soaked = soak(server, load, SOAK_S)
    print(f"{soaked.finished} finished, {soaked.cut} cut, {soaked.refused} refused; growth {soaked.growth()}")
    assert soaked.wrong == [], "\n".join(soaked.wrong)
    assert min(soaked.finished, soaked.cut, soaked.refused) > SOAK_S / 10
    check_counters(server, load, soaked, before)
    assert sorted(server.command.ranks()) == [0, 1, 2, 3]
    assert all(abs(grown) < FLAT for grown in soaked.growth().values()), soaked.growth()
