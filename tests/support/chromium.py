"""A headless Chromium controlled through the DevTools protocol over a pipe, without port, driver or library."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 30.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers, where Chromium's own sandbox cannot
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--remote-debugging-pipe",
)
REDIRECT = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
"""Connect the pipes: Chromium reads the protocol from descriptor 3 and writes to 4."""


def find_chromium() -> str | None:
    """Return Chromium's program; None if it is not installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class PageLeft(Exception):
    """The page changed while an expression was evaluated."""


class Page:
    """One page in its own browser, with a list of all errors on it."""

    def __init__(self, profile: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Start a browser.

        Args:
            profile: Folder of its profile.
            width: Width of the window.
            height: Height of the window.
            dark: Prefer dark colours.
        """
        program = find_chromium()
        assert program is not None, "no chromium; run: apt-get install chromium"
        ours_read, its_write = os.pipe()
        its_read, ours_write = os.pipe()
        for descriptor in (its_read, its_write):
            os.set_inheritable(descriptor, True)
        flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        command = [sys.executable, "-c", REDIRECT, str(its_read), str(its_write), program, *flags]
        self._log = (profile.parent / f"{profile.name}.log").open("wb")
        self._process = subprocess.Popen(
            command, pass_fds=(its_read, its_write), stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )
        os.close(its_read)
        os.close(its_write)
        self._read, self._write = ours_read, ours_write
        self._rest = b""
        self._last = 0
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        try:
            self._attach(width=width, height=height, dark=dark)
        except BaseException:
            self.close()
            raise

    def _attach(self, *, width: int, height: int, dark: bool) -> None:
        """Open one page, and subscribe to its events."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for the answer."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == number:
                if "navigated" in str(answer.get("error")):
                    raise PageLeft(f"{method}: {answer['error']}")
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def open(self, url: str) -> None:
        """Go to an address."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression on the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, f"{script}: {result['exceptionDetails']}"
        return result["result"].get("value")

    def wait(self, script: str, *, deadline_s: float = DEADLINE_S) -> Any:
        """Wait until an expression is truthy, also across a change of the page, and return its value."""
        end = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(PageLeft):
                value = self.run(f"(() => {{ try {{ return {script}; }} catch {{ return null; }} }})()")
                if value:
                    return value
                self.run("new Promise((resolve) => setTimeout(resolve, 20))")
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {script}; errors: {self.errors}"

    def press(self, key: str) -> None:
        """Press a key such as "ArrowDown"."""
        codes = {"ArrowDown": 40, "ArrowUp": 38, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes.get(key, 0))

    def type(self, text: str) -> None:
        """Write into the field that has the focus."""
        self.call("Input.insertText", text=text)

    def point(self, selector: str, *, click: bool = False) -> None:
        """Move the pointer to the middle of an element, and click it if requested."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.run(
            f"(({{x, y, width, height}}) => [x + width / 2, y + height / 2])({found}.getBoundingClientRect())"
        )
        place = {"x": box[0], "y": box[1]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **place)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def picture(self, file: Path) -> None:
        """Write a screenshot as PNG."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End the browser."""
        with contextlib.suppress(OSError, AssertionError):
            self._session = None
            self.call("Browser.close")
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _note(self, event: dict[str, Any]) -> None:
        method, of = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(of["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = of["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and of["entry"]["level"] == "error":
            self.errors.append(f"{of['entry']['text']} ({of['entry'].get('url', '')})")
        elif method == "Runtime.consoleAPICalled" and of["type"] in ("error", "assert"):
            self.errors.append(str([value.get("value", value.get("description")) for value in of["args"]]))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser did not answer within {DEADLINE_S:g} s"
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
