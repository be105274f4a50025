"""What clients of ``lockstep serve`` see of a slow reader beside them, of a rank that stands still, or dies."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from command_line import LOCKSTEP, run, wait_until
from http_server import Server, serving
from listening import framed, listening_addresses, pickle_that_makes, send_to
from tiny_checkpoints import write_tiny_checkpoint

from launch.environment import API_KEY
from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(40)

ENDLESS: dict[str, Any] = {"prompt": "a", "max_tokens": 2000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "llama", max_position_embeddings=4096)
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--stream-buffer", "64", "--health-timeout", "4")
    faults = ("--max-recoveries", "0", "--stall-timeout", "60")
    with serving(*options, *faults, environ={API_KEY: "secret"}, key="secret") as started:
        yield started


def health(server: Server) -> httpx.Response:
    return httpx.get(f"{server.url}/health")


def stalled_stream(server: Server, **fields: Any) -> socket.socket:
    """Returns a connection on which a stream was asked for, and of which nothing is read."""
    address = urlsplit(server.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect((address.hostname, address.port))
    body = json.dumps(ENDLESS | {"stream": True} | fields).encode()
    key = f"Authorization: Bearer {server.key}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: {len(body)}\r\n".encode()
    connection.sendall(head + b"Connection: close\r\n\r\n" + body)
    return connection


def received(server: Server) -> float:
    """Returns how many requests the server sent to its engine so far."""
    with server.http() as http:
        text = http.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("lockstep:requests_received_total ")]
    return float(line.split()[1])


def test_ranks_are_not_given_the_key(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="other", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.completions.create(model=server.model, prompt="a", max_tokens=1)
    assert len(server.command.ranks()) == 4
    for rank in server.command.ranks().values():
        assert API_KEY not in rank.environ()


def test_a_reader_that_does_not_read(server: Server) -> None:
    """It is cut when its buffers are full; who reads is served as if it were not there."""
    client = server.client()
    fields: dict[str, Any] = {"model": server.model, "prompt": "One two", "temperature": 0, "max_tokens": 40}
    alone = client.completions.create(**fields).choices[0].text
    # Supports of 320 ids make events of several kB.
    before = received(server)
    connection = stalled_stream(server, n=16, return_support=True, logprobs=20)
    # It may be cut so soon that it is never seen under way.
    wait_until(lambda: received(server) == before + 1, 60, "the stream to begin")
    assert client.completions.create(**fields).choices[0].text == alone
    wait_until(lambda: health(server).json()["open_requests"] == 0, 60, "the stream to be cut")
    connection.settimeout(10)
    read = b""
    while part := connection.recv(1 << 16):
        read += part
    assert read.count(b"data: ") > 10
    assert b"[DONE]" not in read
    assert client.completions.create(**fields).choices[0].text == alone


def test_a_client_that_leaves_in_the_middle_of_its_body(server: Server) -> None:
    address = urlsplit(server.url)
    for path in ("/v1/completions", "/tokenize"):
        with socket.create_connection((address.hostname, address.port)) as connection:
            key = f"Authorization: Bearer {server.key}"
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{key}\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode() + b'{"prompt":')
    assert server.client().completions.create(model=server.model, prompt="a", max_tokens=1).choices
    assert "Traceback" not in (server.command.folder / "stderr").read_text()


def test_texts_of_megabytes_are_refused_unread(server: Server) -> None:
    """Reading them took the leader for so long that it counted as a rank that stalls."""
    huge = "a b c d " * 900_000
    with server.http() as http:
        for path, fields in (
            ("/v1/completions", {"prompt": huge}),
            ("/tokenize", {"prompt": huge}),
            ("/v1/score", {"prompt": huge}),
        ):
            reply = http.post(path, json=fields)
            assert reply.status_code == 400, reply.text
            assert f"{128 * 4096} are read with a context of 4096 tokens" in reply.text


def test_a_rank_that_stands_still_and_goes_on(server: Server) -> None:
    assert health(server).status_code == 200
    last = server.command.ranks()[3]
    last.suspend()
    try:
        wait_until(lambda: health(server).status_code == 503, 15, "/health to say no")
        assert health(server).json()["status"] == "silent"
    finally:
        last.resume()
    wait_until(lambda: health(server).status_code == 200, 10, "/health to say yes again")


def test_a_pickle_to_whoever_listens(server: Server, tmp_path: Path) -> None:
    """Nobody reads it as one, and a stream that runs meanwhile is not disturbed."""
    client = server.client()
    fields: dict[str, Any] = {"model": server.model, "prompt": "One two", "temperature": 0, "max_tokens": 300}
    alone = client.completions.create(**fields, extra_body={"ignore_eos": True}).choices[0].text
    marker = tmp_path / "unpickled"
    payload = pickle_that_makes(marker)
    addresses = listening_addresses(server.command.family(), server.command.folder)
    assert [address for address in addresses if isinstance(address, str)], "the socket of the front side"
    assert (urlsplit(server.url).hostname, urlsplit(server.url).port) in addresses
    with client.completions.create(**fields, stream=True, extra_body={"ignore_eos": True}) as stream:
        events = iter(stream)
        text = next(events).choices[0].text
        for address in addresses:
            for frame in framed(payload):
                send_to(address, frame)
        text += "".join(choice.text for event in events for choice in event.choices)
    assert text == alone
    with server.http() as http:
        reply = http.post("/v1/completions", content=payload, headers={"Content-Type": "application/x-pickle"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert client.completions.create(**fields, extra_body={"ignore_eos": True}).choices[0].text == alone
    assert sorted(server.command.ranks()) == [0, 1, 2, 3]
    assert not marker.exists()
    pickle.loads(payload)
    assert marker.exists()


def test_a_rank_that_dies(server: Server) -> None:
    """Streams end with an error that the SDK raises; the server names the rank and leaves with the documented code."""
    client = server.client()
    raised: list[Exception] = []

    def read() -> None:
        try:
            for _ in client.completions.create(model=server.model, stream=True, extra_body=ENDLESS, prompt="a"):
                begun.set()
        except openai.APIError as error:
            raised.append(error)

    begun = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(20)
    server.command.ranks()[2].send_signal(signal.SIGKILL)
    reader.join(20)
    assert "rank 2" in str(raised[0])
    outcome = server.command.wait(20)
    assert outcome.returncode == ExitCode.RANK_FAILED
    assert "rank 2" in outcome.message
    server.command.check_nothing_left()


def test_the_server_is_killed(tmp_path: Path) -> None:
    """Nobody is left to say anything: its clients see their connections end, and its ranks leave."""
    model = write_tiny_checkpoint(tmp_path / "model", "llama", max_position_embeddings=4096)
    ended: list[Exception] = []
    with serving("--model", str(model)) as server:

        def read() -> None:
            try:
                with httpx.stream(
                    "POST", f"{server.url}/v1/completions", json=ENDLESS | {"stream": True}, timeout=60
                ) as response:
                    for _ in response.iter_lines():
                        begun.release()
            except httpx.HTTPError as error:
                ended.append(error)

        begun = threading.Semaphore(0)
        readers = [threading.Thread(target=read) for _ in range(5)]
        for reader in readers:
            reader.start()
        wait_until(lambda: health(server).json()["open_requests"] == 5, 30, "the streams to begin")
        assert begun.acquire(timeout=30)
        server.command.process.kill()
        assert server.command.process.wait(10) == -signal.SIGKILL
        for reader in readers:
            reader.join(10)
        assert [type(error) for error in ended] == [httpx.RemoteProtocolError] * 5
        wait_until(lambda: not server.command.family(), 5, "all processes to end")


def test_keys_that_cannot_be_read(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model", "llama")
    (tmp_path / "empty").write_text("\n")
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    for options, message in (
        (("--api-key-file", str(tmp_path / "none")), "--api-key-file"),
        (("--api-key-file", str(tmp_path / "empty")), "holds no key"),
        (("--port", port), f"--port {port}: Address already in use"),
        (("--tp", "200"), "tp"),
    ):
        outcome = run(*LOCKSTEP, "serve", "--model", str(model), *options)
        assert outcome.returncode == ExitCode.USAGE, outcome.stderr
        assert message in outcome.message
    taken.close()
