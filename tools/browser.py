"""Chromium without a screen, driven over a pipe by its DevTools protocol: for tests and pictures of pages."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-default-apps", "--disable-sync", "--no-first-run", "--hide-scrollbars",
    "--proxy-server=http://127.0.0.1:9", "--remote-debugging-pipe",
)  # fmt: skip
"""The proxy is nobody: the browser is offline."""
SECONDS = 120
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "Escape": 27, "Tab": 9, "Enter": 13}
"""Keys that `press` knows, with their codes."""


class Browser:
    """One page. Close it, or use it as a context.

    Attributes:
        console: the messages that pages have written. requests: the addresses that were asked for.
    """

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        (read, own_write), (own_read, write) = os.pipe(), os.pipe()
        self._read, self._write = own_read, own_write
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (read, write)]

        def connect() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self._folder.name}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            command, preexec_fn=connect, pass_fds=(3, 4), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for fd in (read, write, *ends):
            os.close(fd)
        self._buffer, self._number, self._session = b"", 0, ""
        self._loaded = 0
        self.console: list[str] = []
        self.requests: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the protocol."""
        self._number += 1
        own = self._number
        session = {"sessionId": self._session} if self._session else {}
        command = {"id": own, "method": method, "params": parameters, **session}
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == own:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], SECONDS)[0]:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 20)
            if not part:
                raise RuntimeError("the browser has ended")
            self._buffer += part
        first, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, about: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loaded += 1
        elif event == "Runtime.consoleAPICalled":
            self.console.append(" ".join(str(x.get("value")) for x in about["args"]))
        elif event == "Runtime.exceptionThrown":
            self.console.append(about["exceptionDetails"]["text"])
        elif event == "Log.entryAdded":
            self.console.append(about["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(self, page: Path, fragment: str = "") -> None:
        """Show a file, and wait until it is loaded."""
        before = self._loaded
        self.send("Page.navigate", url=page.resolve().as_uri() + fragment)
        while self._loaded == before:
            self._receive()

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["exception"].get("description", script))
        return found["result"].get("value")

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window in pixels."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def set_theme(self, name: str) -> None:
        """Show pages "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def stop_scripts(self) -> None:
        """Show pages that are opened from now on without script."""
        self.send("Emulation.setScriptExecutionDisabled", value=True)

    def _center_of(self, element: str) -> tuple[float, float]:
        """element: an expression in the page."""
        place = self.evaluate(
            f"(()=>{{const e={element};e.scrollIntoView({{block:'center'}});const r=e.getBoundingClientRect();"
            "return [r.left+Math.min(60,r.width/2),r.top+r.height/2]})()"
        )
        return place[0], place[1]

    def hover(self, element: str) -> None:
        """Point at an element."""
        x, y = self._center_of(element)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, element: str) -> None:
        """Click on an element."""
        x, y = self._center_of(element)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key of `KEYS`."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key],
                **(text if kind == "keyDown" else {}),
            )  # fmt: skip

    def save_picture(self, path: Path, *, left: int = 0, top: int = 0, width: int = 0, height: int = 0) -> Path:
        """Save a picture of the window, or of a part of the page, as PNG."""
        clip = {"clip": {"x": left, "y": top, "width": width, "height": height, "scale": 1}} if width else {}
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=bool(width), **clip)["data"]
        path.write_bytes(base64.b64decode(data))
        return path

    def close(self) -> None:
        """End the browser."""
        self._process.terminate()
        self._process.wait(SECONDS)
        for fd in (self._read, self._write):
            os.close(fd)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
