"""Headless Chromium for tests, driven over its debugging pipe: no library, no port, no network."""

import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
# Chromium reads its commands from descriptor 3 and answers on 4.
LAUNCH = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
DEADLINE_S = 60.0  # for one answer


class Browser:
    """One Chromium with one page; a context manager.

    Attributes:
        messages: of the console at error level, uncaught exceptions, and violations of a page's policy.
        requests: addresses that the page asked for, its own included.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self.messages: list[str] = []
        self.requests: list[str] = []
        self._ids = itertools.count(1)
        self._rest = b""
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        theirs, self._out = os.pipe()
        self._in, mine = os.pipe()
        words = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars",
                 "--no-first-run", "--disable-background-networking", "--disable-component-update",
                 "--disable-dev-shm-usage", f"--user-data-dir={profile}"]  # fmt: skip
        words += ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(theirs), str(mine), *words],
            pass_fds=(theirs, mine), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs)
        os.close(mine)
        target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
        self._session = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._send("Browser.close", {})
            self._process.wait(10)
        except (OSError, RuntimeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **values: Any) -> dict[str, Any]:
        """A command of the debugging protocol for the page; raises RuntimeError where it fails."""
        return self._send(method, values, self._session)

    def view(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Size of the window in pixels, and the reader's colours."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[scheme])

    def open(self, path: Path) -> None:
        """Load a file; returns when its load event has come."""
        self._events.clear()
        self.messages.clear()
        self.requests.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + DEADLINE_S
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._read(deadline)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited."""
        found = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def press(self, key: str, code: int) -> None:
        """A key, down and up."""
        values: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **values, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **values)

    def _send(self, method: str, values: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": values} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        deadline = time.monotonic() + DEADLINE_S
        while number not in self._answers:
            self._read(deadline)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def _read(self, deadline: float) -> None:
        ready, _, _ = select.select([self._in], [], [], max(deadline - time.monotonic(), 0))
        data = os.read(self._in, 1 << 20) if ready else b""
        if not data:
            raise RuntimeError("Chromium did not answer" if not ready else "Chromium has ended")
        *whole, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, whole):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._take(message)

    def _take(self, event: dict[str, Any]) -> None:
        self._events.append(event)
        name, values = event["method"], event["params"]
        if name == "Runtime.exceptionThrown":
            self.messages.append(str(values["exceptionDetails"])[:500])
        elif name == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.messages.append(str(values["args"])[:500])
        elif name == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.messages.append(str(values["entry"]["text"]))
        elif name == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
