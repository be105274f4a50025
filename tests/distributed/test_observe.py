"""What can be seen of a server: its metrics add up, every rank tells where it is, and the page shows both."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from browser import CHROMIUM, Page, browser_page
from command_line import wait_until
from http_server import Server, serving, write_chat_model
from prometheus_client.parser import text_string_to_metric_families

from launch.serve.replies import RankReply, RanksReply

pytestmark = pytest.mark.long(40)

GRAMMAR = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_chat_model(tmp_path_factory.mktemp("chat-model"))
    options = ("--model", str(model), "--tp", "2", "--pp", "2", "--served-model-name", "tiny")
    with serving(*options, "--max-requests", "20", "--stall-timeout", "60") as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as plain:
        yield plain


def samples(http: httpx.Client) -> dict[tuple[str, tuple[str, ...]], float]:
    """Returns every sample of /metrics by its name and the values of its labels."""
    reply = http.get("/metrics")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/plain")
    return {
        (sample.name.removeprefix("lockstep:"), tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def finished(found: dict[tuple[str, tuple[str, ...]], float]) -> Counter[str]:
    return Counter(
        {labels[0]: int(value) for (name, labels), value in found.items() if name == "requests_finished_total"}
    )


def ranks(http: httpx.Client) -> list[RankReply]:

    return msgspec.json.decode(http.get("/v1/ranks").content, type=RanksReply).data


def test_counters_add_up_over_http(server: Server, http: httpx.Client) -> None:
    before = samples(http)
    body = {"model": "tiny", "prompt": "a", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert http.post("/v1/completions", json=body | {"prompt": ["a", "b", "c"], "n": 2}).status_code == 200
    assert http.post("/v1/completions", json=body | {"temperature": -1}).status_code == 400
    assert http.post("/v1/completions", json=body | {"choice": ["yes", "no"], "ignore_eos": False}).status_code == 200
    assert http.post("/tokenize", json={"model": "tiny", "prompt": 3}).status_code == 400
    with http.stream("POST", "/v1/completions", json=body | {"stream": True, "max_tokens": 1500}) as stream:
        next(stream.iter_lines())
    wait_until(lambda: samples(http)["requests_unfinished", ()] == 0, 20, "the cut stream to end")
    after = samples(http)
    ended = finished(after) - finished(before)
    assert ended["abort"] == 1
    assert ended["rejected"] <= 1
    assert ended["length"] + ended["stop"] == 5
    assert after["requests_received_total", ()] == sum(finished(after).values())
    choices = sum(value for (name, _), value in after.items() if name == "choices_finished_total")
    assert choices == sum(finished(after).values()) - finished(after)["rejected"] + 3


def test_a_request_under_way_is_seen(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 400, "ignore_eos": True, "temperature": 0}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(http.post, "/v1/completions", json=body)
        wait_until(lambda: samples(http)["sequences_running", ()] == 1, 20, "the leader to tell of it")
        found = samples(http)
        assert found["requests_unfinished", ()] == 1
        assert found["requests_received_total", ()] == sum(finished(found).values()) + 1
        assert found["kv_cache_usage_ratio", ()] > 0
        assert answer.result().json()["usage"]["completion_tokens"] == 400
    wait_until(lambda: samples(http)["sequences_running", ()] == 0, 20, "its end to be told")


def test_every_rank_tells_where_it_is(http: httpx.Client) -> None:
    def have_come_to_rest() -> bool:
        heard = ranks(http)
        return len(heard) == 4 and len({one.busy_steps for one in heard}) == 1

    wait_until(have_come_to_rest, 20, "all ranks to be heard of after the last request")
    found = ranks(http)
    assert [(one.rank, one.stage, one.tp_rank) for one in found] == [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
    for one in found:
        assert one.heartbeat_age_s < 5
        assert len(one.digest) == 16
        assert one.step > 0
        assert one.busy_steps > 0
        assert one.last_step_s > 0
        assert one.mean_step_s > 0
        assert 0 < one.wait_share < 1
    by_step: dict[int, set[str]] = {}
    for one in found:
        by_step.setdefault(one.step, set()).add(one.digest)
    assert all(len(digests) == 1 for digests in by_step.values())
    first = found[0].step
    wait_until(lambda: min(one.step for one in ranks(http)) > first, 10, "an idle engine to go on")


def test_a_stopped_rank_is_seen_while_it_stands(server: Server, http: httpx.Client) -> None:
    stopped = server.command.ranks()[3]
    stopped.suspend()
    try:
        wait_until(lambda: ranks(http)[3].heartbeat_age_s > 3, 20, "its silence to be seen")
    finally:
        stopped.resume()
    wait_until(lambda: all(one.heartbeat_age_s < 2.5 for one in ranks(http)), 20, "it to be heard again")
    assert http.get("/health").status_code == 200


def test_the_page_needs_nothing_from_elsewhere(http: httpx.Client) -> None:
    reply = http.get("/")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "http://" not in reply.text
    assert "https://" not in reply.text
    assert 'src="' not in reply.text


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    with browser_page() as opened:
        opened.resize(1200, 1100)
        opened.go(server.url + "/")
        yield opened


def test_the_page_shows_the_grid_of_ranks(page: Page) -> None:
    page.wait_for("document.querySelectorAll('.rank').length === 4")
    cells = page.run(
        "[...document.querySelectorAll('.rank')]"
        ".map(one => [one.dataset.rank, one.style.gridRow, one.style.gridColumn])"
    )
    assert [[cell[0], cell[1][0], cell[2][0]] for cell in cells] == [
        ["0", "1", "1"],
        ["1", "1", "2"],
        ["2", "2", "1"],
        ["3", "2", "2"],
    ]
    step = "Number(document.querySelector('.rank [data-fact=step]').textContent)"
    first = page.run(step)
    page.wait_for(f"{step} > {first}")
    page.wait_for("document.getElementById('health').textContent === 'ok'")
    assert page.run("document.getElementById('engine').textContent").startswith("tiny on TP2 × PP2, float32 on cpu")


def test_the_playground_runs_a_constrained_generation(page: Page) -> None:
    page.run(
        "document.getElementById('prompt').value = 'a';"
        "document.getElementById('form-of').value = 'text';"
        f"document.getElementById('grammar').value = {json.dumps(json.dumps(GRAMMAR))};"
        "document.getElementById('seed').value = '7';"
        "document.getElementById('run').click()"
    )
    page.wait_for("document.getElementById('output').dataset.done")
    assert page.run("document.getElementById('error').textContent") == ""
    assert page.run("document.getElementById('output').dataset.done") in ("stop", "length")
    tokens = page.run(
        "[...document.querySelectorAll('.token')].map(one =>"
        " [one.textContent, one.dataset.allowed, one.dataset.p, one.classList.contains('forced')])"
    )
    assert tokens[0][0].strip().startswith("{")
    for text, allowed, probability, forced in tokens:
        assert allowed.isdecimal(), text
        assert int(allowed) >= 1
        assert 0 <= float(probability) <= 1
        assert forced == (allowed == "1")
        assert not forced or float(probability) == pytest.approx(1, abs=1e-3)
    assert any(forced for *_, forced in tokens)
    assert not all(forced for *_, forced in tokens)
    assert "forced" in page.run("document.getElementById('about').textContent")


def test_the_playground_tells_what_is_wrong_and_can_be_stopped(page: Page) -> None:
    page.run(
        "document.getElementById('kind').value = 'regex';"
        "document.getElementById('grammar').value = '(';"
        "document.getElementById('run').click()"
    )
    page.wait_for("document.getElementById('error').textContent")
    assert "regex" in page.run("document.getElementById('error').textContent")
    page.run(
        "document.getElementById('grammar').value = '[a-c]{200}';"
        "document.getElementById('max-tokens').value = '200';"
        "document.getElementById('run').click()"
    )
    page.wait_for("document.querySelectorAll('.token').length > 3")
    page.run("document.getElementById('stop').click()")
    page.wait_for("!document.getElementById('run').disabled")
    assert page.run("document.getElementById('output').dataset.done") == "stopped"


def test_the_page_reports_no_problem(page: Page) -> None:
    page.run("1")
    unexpected = [one for one in page.problems if "400" not in one and "favicon" not in one]
    assert unexpected == []
