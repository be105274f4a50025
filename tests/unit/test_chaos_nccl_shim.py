"""The shim before libnccl, against a small fake library with a C caller: what happens at which call, and is told."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from launch.chaos.error import ChaosError
from launch.chaos.faults import Action, Injection
from launch.chaos.nccl_shim import ACTIONS, FUNCTIONS, SOURCE, build_shim, shim_environ
from launch.chaos.script.run import ScriptRun
from tp.compiled_library import BuildError, compiler

# As much of NCCL as the caller needs: it adds up what was reduced, so that a call that was not made shows.
FAKE = """
#include <stddef.h>
int made;
int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, void *comm, void *stream) {
    (void)from; (void)to; (void)count; (void)type; (void)op; (void)comm; (void)stream;
    made++;
    return 0;
}
int ncclSend(const void *from, size_t count, int type, int peer, void *comm, void *stream) {
    (void)from; (void)count; (void)type; (void)peer; (void)comm; (void)stream;
    return 0;
}
int ncclCommGetAsyncError(void *comm, int *error) { (void)comm; *error = 0; return 0; }
"""
CALLER = """
#include <stdio.h>
#include <stddef.h>
extern int made;
int ncclAllReduce(const void *, void *, size_t, int, int, void *, void *);
int ncclSend(const void *, size_t, int, int, void *, void *);
int ncclCommGetAsyncError(void *, int *);
int main(void) {
    for (int call = 0; call < 4; call++) {
        int error = -1, result = ncclAllReduce(NULL, NULL, 1, 7, 0, NULL, NULL);
        ncclCommGetAsyncError(NULL, &error);
        printf("%d %d %d\\n", result, error, made);
        fflush(stdout);
    }
    return ncclSend(NULL, 1, 7, 0, NULL, NULL);
}
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Returns the shim and the caller."""
    folder = tmp_path_factory.mktemp("nccl")
    try:
        command = compiler(os.environ)
    except BuildError as error:
        pytest.skip(str(error))
    (folder / "fake.c").write_text(FAKE)
    (folder / "caller.c").write_text(CALLER)
    library, caller = folder / "libnccl.so", folder / "caller"
    subprocess.run([*command, "-shared", "-fPIC", "-o", library, folder / "fake.c"], check=True)
    subprocess.run([*command, "-o", caller, folder / "caller.c", library, f"-Wl,-rpath,{folder}"], check=True)
    return build_shim(folder / "cache", os.environ), caller


def call(built: tuple[Path, Path], folder: Path, injection: Injection, rank: int = 1) -> subprocess.Popen[str]:
    shim, caller = built
    ours = shim_environ(shim, injection, {}) | {"RANK": str(rank), "LOCKSTEP_CHAOS_FOLDER": str(folder)}
    return subprocess.Popen([caller], env=ours, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("action", "lines"),
    [
        ("error", ["0 0 1", "0 0 2", "6 0 2", "0 0 3"]),
        ("async_error", ["0 0 1", "0 0 2", "0 6 2", "0 6 3"]),
        ("slow", ["0 0 1", "0 0 2", "0 0 3", "0 0 4"]),
    ],
)
def test_the_third_call_of_the_victim(
    built: tuple[Path, Path], tmp_path: Path, action: Action, lines: list[str]
) -> None:
    injection = Injection(action=action, rank=1, call="all_reduce", number=2, seconds=0.25)
    began_s = time.monotonic()
    process = call(built, tmp_path, injection)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines() == lines
    assert process.returncode == 0
    fired = json.loads((tmp_path / "fired-nccl").read_text())
    assert (fired["action"], fired["rank"], fired["where"]) == (action, 1, "inside ncclAllReduce")
    assert began_s <= fired["t_s"] <= time.monotonic()
    if action == "slow":
        assert time.monotonic() - began_s >= 0.25


def test_a_call_that_never_returns(built: tuple[Path, Path], tmp_path: Path) -> None:
    process = call(built, tmp_path, Injection(action="sleep", rank=1, call="send"))
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(4)][-1] == "0 0 4\n"
    deadline_s = time.monotonic() + 30
    while not (tmp_path / "fired-nccl").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert process.poll() is None
    process.kill()
    process.communicate()


def test_other_ranks_are_left_alone(built: tuple[Path, Path], tmp_path: Path) -> None:
    process = call(built, tmp_path, Injection(action="error", rank=1, call="all_reduce"), rank=0)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "0 0 4"
    assert list(tmp_path.iterdir()) == []


def test_it_is_built_once(built: tuple[Path, Path]) -> None:
    shim, _ = built
    before = shim.stat().st_mtime_ns
    assert build_shim(shim.parent, os.environ) == shim
    assert shim.stat().st_mtime_ns == before
    assert [path.name for path in shim.parent.iterdir()] == [shim.name]


def test_without_a_compiler(tmp_path: Path) -> None:
    with pytest.raises(ChaosError, match="--nccl-shim needs a C compiler: no-such-compiler is not there"):
        build_shim(tmp_path, {"CC": "no-such-compiler", "PATH": os.environ["PATH"]})


def test_the_source_knows_every_function_and_action() -> None:
    source = SOURCE.read_text()
    for function in FUNCTIONS.values():
        assert f"CALL({function}," in source
    for action in ACTIONS.values():
        assert f'strcmp(action, "{action}")' in source


def test_what_nccl_has_no_word_for_happens_in_the_backend() -> None:
    run = ScriptRun(
        script="a:b", ranks=2, limit_s=1, start_limit_s=1, group_timeout_s=None, nccl_shim=Path("/x/libnccl_faults.so")
    )
    variables = run.shim_variables(Injection(action="slow", rank=1, call="all_gather", number=3, seconds=0.5))
    assert variables["LOCKSTEP_NCCL_FAULT"] == "1:ncclAllGather:3:delay:500"
    assert variables["LD_PRELOAD"].startswith("/x/libnccl_faults.so")
    assert run.shim_variables(Injection(action="kill", rank=1, call="all_gather")) == {}
    assert run.shim_variables(Injection(action="error", rank=1, call="barrier")) == {}
    assert run.shim_variables(None) == {}
