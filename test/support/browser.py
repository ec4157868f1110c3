"""A headless Chromium, driven over its DevTools protocol."""

import asyncio
import base64
import contextlib
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

START_S = 60.0


class Page:
    """A page in a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._number = socket, 0

    async def command(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a DevTools command and return its result. Raises ``AssertionError`` for an error."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            answer = await self._socket.receive_json(timeout=START_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    async def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        done = await self.command(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until a JavaScript expression is true."""
        ends = time.monotonic() + START_S
        while not await self.evaluate(script):
            assert time.monotonic() < ends, f"never true: {script}"
            await asyncio.sleep(0.1)

    async def look(self, width: int, height: int = 1500, dark: bool = False) -> None:
        """Set the size of the screen and the colour scheme."""
        await self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.command("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """Write the whole page as PNG."""
        made = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextlib.asynccontextmanager
async def browser(folder: Path, url: str) -> AsyncIterator[Page]:
    """Open ``url`` in a browser with its profile in ``folder``. Skip the test without Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("no chromium here; Debian has it as the package chromium")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0")
    with subprocess.Popen(
        [program, *flags, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            port = await _port(folder / "DevToolsActivePort")
            async with aiohttp.ClientSession() as session:
                where = f"http://127.0.0.1:{port}/json/new?about:blank"
                async with session.put(where) as answer:
                    target = (await answer.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(target, max_msg_size=0) as socket:
                    page = Page(socket)
                    await page.command("Page.enable")
                    await page.command("Page.setBypassCSP", enabled=True)
                    await page.command("Page.navigate", url=url)
                    yield page
        finally:
            process.kill()


async def _port(file: Path) -> str:
    ends = time.monotonic() + START_S
    while not (file.exists() and file.read_text().strip()):
        assert time.monotonic() < ends, "the browser did not start"
        await asyncio.sleep(0.1)
    return file.read_text().split()[0]
