"""The one server that the files of this folder ask: it is its start that takes time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import openai
import pytest
from command_line import ROOT
from http_server import Server, serving, write_chat_model

_SERVER = pytest.StashKey[Server]()


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Starts the server that all files of this folder ask; it ends with the last of them."""
    folder: pytest.Collector = request.node.parent
    if _SERVER not in folder.stash:
        running = ExitStack()
        folder.stash[_SERVER] = running.enter_context(_started(tmp_path_factory))
        folder.addfinalizer(partial(_end, folder, running))
    return folder.stash[_SERVER]


def _end(folder: pytest.Collector, running: ExitStack) -> None:
    del folder.stash[_SERVER]
    running.close()


@contextmanager
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_chat_model(tmp_path_factory.mktemp("chat-model"))
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("first-key\nsecond-key\n")
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--served-model-name", "tiny")
    limits = ("--max-body-bytes", "100000", "--max-requests", "40", "--max-prompts", "30")
    processor = ("--logit-processor", "example_processors:FailsLate")
    environ = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
    asked = (*options, *limits, *processor, "--api-key-file", str(keys))
    with serving(*asked, environ=environ, key="second-key") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as plain:
        yield plain
