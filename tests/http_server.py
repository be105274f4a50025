"""Runs ``lockstep serve`` on real ranks, for tests that speak HTTP to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
from command_line import LOCKSTEP, Running, running
from tiny_checkpoints import write_tiny_checkpoint

from launch.exit_codes import ExitCode

_CHAT_TEMPLATE = """{% for message in messages %}<{{ message.role }}>{{ message.content }}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""


@dataclass(frozen=True)
class Server:
    """A server that runs.

    Args:
        url: Where it is.
        model: The model's name.
        command: The process, and those it started.
        key: The key it needs.
    """

    url: str
    model: str
    command: Running
    key: str = "none"

    def client(self, key: str | None = None) -> openai.OpenAI:
        """Returns a client that tries everything once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, max_retries=0, timeout=120)

    def http(self) -> httpx.Client:
        """Returns a client without a form of its own."""
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {self.key}"}, timeout=120)


def write_chat_model(folder: Path) -> Path:
    """Returns a folder with a tiny model that has a chat template."""
    write_tiny_checkpoint(folder, "qwen3", max_position_embeddings=2048)
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE)
    return folder


@contextmanager
def serving(
    *options: str, environ: Mapping[str, str] | None = None, key: str = "none", executed: bool = False
) -> Iterator[Server]:
    """Runs ``lockstep serve`` with ``options`` on a free port, until it is told to leave."""
    with running(*LOCKSTEP, "serve", "--port", "0", *options, environ=environ, executed=executed) as command:
        line = command.wait_for_message("serving ", 180)
        model = line.split("serving ")[1].split(" on ")[0]
        yield Server(line.rsplit(" at ", 1)[1].removesuffix("/v1"), model, command, key)
        if command.process.poll() is None:
            outcome, seconds = command.interrupt(signal.SIGTERM, 20)
            assert outcome.returncode == ExitCode.TERMINATED, outcome.stderr
            assert seconds < 10
        if command.process.returncode != -signal.SIGKILL:
            # One that was killed cannot take its folder away.
            command.check_nothing_left()
