"""A headless Chromium, controlled through the DevTools protocol over a pipe."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from itertools import count
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


def find_chromium() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """A browser with one page. Use as a context manager."""

    def __init__(self, path: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        child_in, parent_out = os.pipe()
        parent_in, child_out = os.pipe()
        # Chromium reads descriptor 3 and writes descriptor 4; the shell moves the pipes there.
        command = f'exec "$@" 3<&{child_in} 4>&{child_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", path, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            pass_fds=(child_in, child_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(child_in)
        os.close(child_out)
        self._in, self._out = os.fdopen(parent_in, "rb"), os.fdopen(parent_out, "wb", buffering=0)
        self._numbers = count(1)
        self._buffer = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        self.address = "about:blank"

    def __enter__(self) -> Self:
        pages = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in pages if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._in.close()
        self._out.close()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method and return its result; events that arrive in between are stored."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        while (reply := self._receive()).get("id") != number:
            self.events.append(reply)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    def open(self, path: Path) -> None:
        """Open a file and wait until it has loaded. Forgets earlier events."""
        self.events.clear()
        self.address = path.resolve().as_uri()
        self.call("Page.navigate", url=self.address)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._receive())

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        reply = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in reply:
            raise RuntimeError(str(reply["exceptionDetails"]))
        return reply["result"].get("value")

    def errors(self) -> list[str]:
        """Return errors and warnings of the page: exceptions, the console, and the log with security violations."""
        self.evaluate("0")  # what was reported before this has arrived after it
        messages = []
        for event in self.events:
            details = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                messages.append(str(details["exceptionDetails"]))
            elif event["method"] == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
                messages.append(str(details["args"]))
            elif event["method"] == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                messages.append(details["entry"]["text"])
        return messages

    def requests(self) -> list[str]:
        """Return the addresses that the page requested."""
        return [event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"]

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            chunk = os.read(self._in.fileno(), 1 << 16)
            if not chunk:
                raise RuntimeError(f"Chromium ended with code {self._process.wait()}")
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        reply: dict[str, Any] = json.loads(message)
        return reply


def wait_until(page: Chromium, condition: str) -> None:
    """Wait until a JavaScript expression is true in the page.

    Raises:
        AssertionError: it is false after a minute.
    """
    end = time.monotonic() + 60
    while not page.evaluate(f"Boolean({condition})"):
        assert time.monotonic() < end, f"never true: {condition}"
        time.sleep(0.02)
