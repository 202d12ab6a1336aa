"""A headless Chromium for tests, driven over its own pipe: nothing is needed but the browser itself."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# no sandbox: containers have none for it; the rest keeps the browser itself off the network
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-quic",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--remote-debugging-pipe", "--hide-scrollbars", "--force-color-profile=srgb",
)  # fmt: skip


def find() -> str | None:
    """The browser of this machine, if it has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """The commands and events of the DevTools protocol, for one page at a time."""

    def __init__(self, reading: int, writing: int) -> None:
        self._in, self._out = os.fdopen(reading, "rb", buffering=0), os.fdopen(writing, "wb", buffering=0)
        self._rest, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **params: Any) -> dict[str, Any]:
        """Do something and return what came of it; events that come before it are kept."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        session = {"sessionId": self._session} if self._session else {}
        self._out.write(json.dumps({**message, **session}).encode() + b"\0")
        while True:
            found = self._next()
            if found.get("id") == self._number:
                assert "error" not in found, found["error"]
                return found["result"]  # type: ignore[no-any-return]
            self.events.append(found)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = self._in.read(1 << 16)
            assert read, "the browser is gone"
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)  # type: ignore[no-any-return]

    def open(self, path: Path, width: int, *, height: int = 900, scheme: str = "light", media: str = "screen") -> None:
        """Open a file in a window of a width, in a colour scheme, and wait until it is loaded."""
        self.events.clear()
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.do("Emulation.setEmulatedMedia", media=media, features=features)
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.do("Emulation.setDeviceMetricsOverride", **shape)
        self.do("Page.navigate", url=path.resolve().as_uri())
        while not self.named("Page.loadEventFired"):
            self.events.append(self._next())

    def named(self, *methods: str) -> list[dict[str, Any]]:
        """The events of these names since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def complaints(self) -> list[dict[str, Any]]:
        """What was logged or thrown."""
        self.run("0")  # what was logged before it is here by now
        return self.named("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")

    def requests(self) -> list[str]:
        """What was asked for beside the file itself and what it holds."""
        urls = [one["request"]["url"] for one in self.named("Network.requestWillBeSent")]
        return [url for url in urls if not url.startswith(("file:", "data:"))]

    def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write all of the page as PNG."""
        size = self.do("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.do("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def print(self, path: Path) -> None:
        """Write the page as PDF, as it is printed."""
        found = self.do("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        path.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def browser(command: str) -> Iterator[Browser]:
    """A browser with a profile of its own, which is gone at the end."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:

        def descriptors() -> None:
            os.dup2(to_read, 3)
            os.dup2(from_write, 4)

        running = subprocess.Popen(
            [command, *FLAGS, f"--user-data-dir={profile}", "about:blank"], preexec_fn=descriptors,
            pass_fds=(3, 4), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        try:
            yield Browser(from_read, to_write)
        finally:
            running.terminate()
            running.wait(30)
