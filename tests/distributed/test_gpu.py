"""The engine on CUDA devices over NCCL gives what it gives on the CPU over gloo. Not run where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_ranks import Case, Job, grammar, run_engine
from ranks import run_ranks
from tiny_checkpoints import write_tiny_checkpoint

from sampler.params import SamplingParams

DEVICES = torch.cuda.device_count()
JOBS = (
    Job((5, 6, 7), 24),
    Job((8, 9), 24, SamplingParams(temperature=1.0, top_k=20, top_p=0.9), seed=5),
    Job((8, 9, 10), 24, SamplingParams(temperature=1.0), seed=6, grammar=grammar(regex="[a-z]{8}")),
)


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_cuda_equals_cpu(tmp_path: Path, tp: int, pp: int) -> None:
    if tp * pp > DEVICES:
        pytest.skip(f"needs {tp * pp} CUDA devices, there are {DEVICES}")
    model = write_tiny_checkpoint(tmp_path / "tiny", "llama")
    on_cpu = run_ranks(run_engine, 1, Case(model, JOBS))
    on_cuda = run_ranks(
        run_engine, tp * pp, Case(model, JOBS, tp=tp, pp=pp, device="cuda"), backend="cpu:gloo,cuda:nccl"
    )
    assert on_cuda[0].outputs == on_cpu[0].outputs
    assert all(record.plans == on_cuda[0].plans for record in on_cuda)


@pytest.mark.gpu
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (3, 1)])
def test_invariant_mode_has_the_same_bits_at_every_size(tmp_path: Path, tp: int, pp: int) -> None:
    if tp * pp > DEVICES:
        pytest.skip(f"needs {tp * pp} CUDA devices, there are {DEVICES}")
    model = write_tiny_checkpoint(tmp_path / "tiny", "llama")
    alone = [Case(model, (job,), device="cuda", invariant=True) for job in JOBS]
    expected = [run_ranks(run_engine, 1, case, backend="cpu:gloo,cuda:nccl")[0].outputs[0][0] for case in alone]
    together = Case(model, JOBS, tp=tp, pp=pp, device="cuda", invariant=True, max_batch_tokens=5)
    (outputs,) = run_ranks(run_engine, tp * pp, together, backend="cpu:gloo,cuda:nccl")[0].outputs
    assert list(outputs) == expected
