"""The served OpenAPI document, and programs that load a server or send it anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from command_line import LOCKSTEP, run
from http_server import Server

from launch.environment import API_KEY
from launch.exit_codes import ExitCode

pytestmark = pytest.mark.long(45)


def test_the_document(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/score", "/tokenize", "/detokenize"):
        assert "post" in document["paths"][path]
    chat_fields = document["components"]["schemas"]["ChatRequest"]
    assert {"temperature", "regex", "tools", "messages", "priority"} <= chat_fields["properties"].keys()
    assert chat_fields["additionalProperties"] is False


def test_the_load_generator(server: Server, tmp_path: Path) -> None:
    """Every request it sends is served; what it counts is what the server's own metrics count."""
    before = generated_tokens(server)
    figures = tmp_path / "figures.json"
    load = ("--requests", "10", "--concurrency", "5", "--prompt-words", "4", "--prefix-words", "16")
    command = (*LOCKSTEP, "bench", "serve", f"{server.url}/v1", *load, "--max-tokens", "60", "--json", str(figures))
    outcome = run(*command, environ={API_KEY: server.key})
    assert outcome.returncode == 0, outcome.stderr + outcome.stdout
    report = json.loads(figures.read_text())
    assert (report["model"], report["errors"]) == ("tiny", {})
    assert report["all"]["finished"] == 10 == report["plain"]["finished"] + report["constrained"]["finished"]
    assert report["all"]["output_tokens"] == generated_tokens(server) - before
    for name in ("first_token", "inter_token", "per_token", "end_to_end"):
        spread = report["constrained"][name]
        assert 0 < spread["median_ms"] <= spread["p90_ms"] <= spread["p99_ms"]
    assert "10 of 10" in outcome.stdout


def generated_tokens(server: Server) -> float:
    with server.http() as http:
        text = http.get("/metrics").text
    (line,) = [line for line in text.splitlines() if line.startswith("lockstep:generation_tokens_total ")]
    return float(line.split()[1])


def test_the_load_generator_tells_errors(server: Server) -> None:
    address = f"{server.url}/v1"
    wrong = run(*LOCKSTEP, "bench", "serve", address, environ={API_KEY: "third-key"})
    assert (wrong.returncode, "401" in wrong.message) == (ExitCode.USAGE, True), wrong.stderr
    load = ("--model", "other", "--requests", "3", "--rate", "50")
    failed = run(*LOCKSTEP, "bench", "serve", address, *load, environ={API_KEY: server.key})
    assert failed.returncode == ExitCode.REQUESTS_FAILED
    assert "3 x http_404: " in failed.stdout
    assert "model_not_found" in failed.stdout


@pytest.mark.parametrize(
    ("phases", "least"),
    [
        (("--phases", "fuzzing", "--max-examples", "8", "--generation-deterministic"), 50),
        pytest.param(
            ("--phases", "coverage,fuzzing", "--max-examples", "150"),
            2000,
            marks=[pytest.mark.sweep, pytest.mark.timeout(1900)],
        ),
    ],
    ids=["few", "many"],
)
def test_replies_to_anything_are_as_documented(
    server: Server, phases: tuple[str, ...], least: int, tmp_path: Path
) -> None:
    """Requests made from the document, right and wrong: no fault of the program, no reply that it does not tell of."""
    checks = (
        "not_a_server_error",
        "status_code_conformance",
        "content_type_conformance",
        "response_schema_conformance",
    )
    command = (sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--no-color")
    options = (
        "--header",
        f"Authorization: Bearer {server.key}",
        "--checks",
        ",".join(checks),
        "--request-timeout",
        "60",
    )
    outcome = subprocess.run(
        [*command, *options, *phases], cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False
    )
    assert outcome.returncode == 0, outcome.stdout[-4000:]
    cases = re.search(r"(\d+) generated, (\d+) passed", outcome.stdout)
    assert cases is not None
    assert int(cases[1]) == int(cases[2]) >= least, outcome.stdout[-4000:]
    assert httpx.get(f"{server.url}/health").json()["status"] == "ok"
