"""The process that runs transformers for ``lockstep bench decode``: jobs on standard input, answers on its output."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from launch.node.parent_death import die_with_parent

if __name__ == "__main__":
    # Before the imports that take seconds: a front side that ends meanwhile must leave no orphan.
    die_with_parent(signal.SIGKILL, sys.argv[1])

import msgspec
import torch
import transformers

from launch.bench.decode_peer import PeerAnswer, PeerJob


class _Clock:
    """A streamer of transformers: notes when it is given something, first the prompts, then the tokens of each step."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.seconds: list[float] = []

    def put(self, _value: torch.Tensor) -> None:
        self.seconds.append(time.perf_counter() - self.started_s)

    def end(self) -> None:
        pass


def _load(path: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if path.is_file() or not (path / "config.json").exists():
        path, file = files[0].parent, files[0].name
        return transformers.AutoModelForCausalLM.from_pretrained(path, gguf_file=file, dtype=dtype).eval()
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def _generate(model: transformers.PreTrainedModel, job: PeerJob) -> PeerAnswer:
    prompts, clock = torch.tensor(job.prompts), _Clock()
    model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        min_new_tokens=job.new_tokens,
        max_new_tokens=job.new_tokens,
        pad_token_id=0,
        eos_token_id=None,
        streamer=clock,
    )
    return PeerAnswer(clock.seconds[1:])


def _send(answer: PeerAnswer) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main(argv: list[str]) -> None:
    """Is the process: ``argv`` is model, dtype and threads."""
    # The terminal's Ctrl-C is for the front side, with which this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    model_path, dtype, threads = Path(argv[0]), getattr(torch, argv[1]), int(argv[2])
    torch.set_num_threads(threads)
    try:
        model = _load(model_path, dtype)
    except (ImportError, OSError, ValueError) as error:
        _send(PeerAnswer(error=" ".join(str(error).split())))
        return
    _send(PeerAnswer(version=transformers.__version__))
    for line in sys.stdin.buffer:
        _send(_generate(model, msgspec.json.decode(line, type=PeerJob)))


if __name__ == "__main__":
    main(sys.argv[2:])
