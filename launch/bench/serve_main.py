"""The process of ``lockstep bench serve``: sends requests to a server; it has neither model nor ranks."""

from __future__ import annotations

from launch.node.early_signals import leave_on_signals

leave_on_signals()

import asyncio
import os
import sys
from functools import partial

import httpx

from launch.bench.output import publish
from launch.bench.serve_load import LoadClient, StreamError
from launch.bench.serve_report import ServeReport
from launch.bench.serve_workload import digest_of, load_requests
from launch.cli.parse import UsageError, parse_command
from launch.commands import BenchServeCommand
from launch.exit_codes import ExitCode
from launch.front.exit import exit_code_of
from launch.node.rank_processes import raise_on_signals
from launch.serve.keys import read_keys


def main(argv: list[str]) -> int:
    """Runs ``lockstep`` with ``argv``, which ask for ``bench serve``; returns the exit code."""
    raise_on_signals()
    return exit_code_of(partial(_run, argv))


def _run(argv: list[str]) -> int:
    command = parse_command(argv)
    if not isinstance(command, BenchServeCommand):
        raise UsageError("this process runs bench serve only")
    keys = read_keys(command.api_key_file, os.environ).keys
    report = asyncio.run(_measure(command, keys[0].decode() if keys else ""))
    publish(report, command.json_file)
    return ExitCode.REQUESTS_FAILED if report.errors else ExitCode.OK


async def _measure(command: BenchServeCommand, key: str) -> ServeReport:
    """Returns what was measured.

    Raises:
        UsageError: The server cannot be asked which models it has.
    """
    client = LoadClient(command.url, key, command.timeout_s)
    try:
        await client.locate()
        model = await client.first_model() if command.model is None else command.model
        requests = load_requests(command, model)
        replies = await client.run(requests, command.concurrency)
    except (httpx.HTTPError, httpx.InvalidURL, StreamError, TimeoutError) as error:
        raise UsageError(f"URL {command.url}: {str(error) or type(error).__name__}") from error
    finally:
        await client.close()
    return ServeReport.of(command, model, digest_of(requests), replies)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
