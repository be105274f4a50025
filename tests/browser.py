"""A headless Chromium, spoken to through two pipes in its own protocol; no driver and no package is needed."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_REPLY_S = 60.0
_FIRST_FREE_FD = 20


class BrowserError(AssertionError):
    """The browser did not do as told."""


class Page:
    """A page of the browser."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.problems: list[str] = []
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")

    def go(self, url: str) -> None:
        """Opens a page, and returns when its script ran."""
        self._ask("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Returns the value of an expression of the page."""
        reply = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise BrowserError(f"{script}: {reply['exceptionDetails']}")
        return reply["result"].get("value")

    def wait_for(self, condition: str, timeout_s: float = 60.0) -> None:
        """Returns when an expression of the page is true."""
        deadline_s = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > deadline_s:
                raise BrowserError(f"waited {timeout_s:g} s for {condition}; problems: {self.problems}")
            time.sleep(0.1)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the window."""
        self._ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path) -> None:
        """Writes what the page looks like, as PNG."""
        path.write_bytes(base64.b64decode(self._ask("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writer, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _REPLY_S
        while True:
            reply = self._next(deadline_s)
            self._note(reply)
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise BrowserError(f"{method}: {reply['error']}")
                result: dict[str, Any] = reply["result"]
                return result

    def _note(self, event: dict[str, Any]) -> None:
        """Keeps what the page complains of."""
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reader], [], [], max(0.0, deadline_s - time.monotonic()))
            data = os.read(self._reader, 1 << 16) if ready else b""
            if not data:
                raise BrowserError("the browser is gone, or does not answer")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded


@contextmanager
def browser_page() -> Iterator[Page]:
    """Gives a page of a new browser, which is ended in the end."""
    assert CHROMIUM is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    passed = [fcntl.fcntl(one, fcntl.F_DUPFD, _FIRST_FREE_FD) for one in (theirs_in, theirs_out)]
    with tempfile.TemporaryDirectory(prefix="lockstep-browser-") as profile:
        options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --remote-debugging-pipe"
        command = f'exec "$0" {options} --user-data-dir="$1" 3<&{passed[0]} 4>&{passed[1]}'
        process = subprocess.Popen(
            ["bash", "-c", command, CHROMIUM, profile],
            pass_fds=passed,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (theirs_in, theirs_out, *passed):
            os.close(one)
        try:
            yield Page(ours_in, ours_out)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(ours_in)
            os.close(ours_out)
