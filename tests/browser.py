"""A headless Chromium for tests of pages: console, requests, what is drawn. Tests skip where there is none.

with open_browser() as browser:
    page = browser.open(path, width=1280)
    page.evaluate("document.title"), page.errors, page.requests
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-port=0",
)  # fmt: skip
LIMIT_S = 60.0


DRAWING_FAULTS = r"""(() => {
  const found = [], shown = t => t.textContent.trim() && getComputedStyle(t).opacity !== '0';
  for (const svg of document.querySelectorAll('figure svg')) {
    const drawn = svg.getBoundingClientRect(), name = svg.getAttribute('aria-label');
    if (!drawn.width) continue;
    const scale = drawn.width / (svg.viewBox.baseVal.width || drawn.width);
    const texts = [...svg.querySelectorAll('text')].filter(shown).map(t => [t, t.getBoundingClientRect()]);
    for (const [t] of texts) {
      const size = parseFloat(getComputedStyle(t).fontSize) * scale;
      if (size < 11.9) found.push(`${name}: ${t.textContent} has ${size.toFixed(1)} px`);
    }
    const rgb = color => (color.match(/[\d.]+/g) || []).slice(0, 3).join();
    const used = new Set([...svg.querySelectorAll('path, rect, line, circle')].flatMap(
      mark => [rgb(getComputedStyle(mark).fill), rgb(getComputedStyle(mark).stroke)]));
    for (const swatch of svg.closest('figure').querySelectorAll('.legend i'))
      if (!used.has(rgb(getComputedStyle(swatch).backgroundColor)))
        found.push(`${name}: no mark has the colour of ${swatch.parentNode.textContent}`);
    const edge = svg.closest('figure').getBoundingClientRect().left;
    for (const [t, box] of texts) if (box.left < edge - 1) found.push(`${name}: ${t.textContent} is cut`);
    texts.forEach(([a, p], i) => texts.slice(i + 1).forEach(([b, q]) => {
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
      const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      if (wide > 1 && high > 2) found.push(`${name}: ${a.textContent} lies on ${b.textContent}`);
    }));
  }
  for (const box of document.querySelectorAll('.table'))
    if (innerWidth > 1000 && box.scrollWidth > box.clientWidth + 1)
      found.push(`${box.textContent.slice(0, 60)} is cut`);
  for (const box of document.querySelectorAll('.tile, .legend, section, .sections'))
    if (box.scrollWidth > box.clientWidth + 1) found.push(`${box.className} ${box.id} is narrower than its content`);
  for (const element of document.querySelectorAll('body *:not(svg *)')) {
    const text = [...element.childNodes].find(n => n.nodeType === 3 && n.textContent.trim());
    if (text && element.getBoundingClientRect().width && parseFloat(getComputedStyle(element).fontSize) < 11)
      found.push(`${text.textContent} has less than 11 px`);
  }
  for (const grid of document.querySelectorAll('.sections')) {
    const boxes = [...grid.children].map(section => section.getBoundingClientRect());
    boxes.forEach((box, i) => {
      if (box.width < 0.7 * grid.clientWidth && boxes.filter(b => Math.abs(b.top - box.top) < 2).length === 1)
        found.push(`${grid.children[i].querySelector('h2').textContent} has an empty half beside it`);
    });
  }
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const node = texts.currentNode;
    if (node.parentNode.closest('svg, pre, code, script, style')) continue;
    const quantities = /\d\s(?:%|[nm\u00b5]?s|min|h|days|[KMGTP]i?B(?:\/s)?|[KMGT]?FLOP\/s|USD)(?![\w\/])/g;
    for (const quantity of node.data.matchAll(quantities)) {
      const range = document.createRange();
      range.setStart(node, quantity.index);
      range.setEnd(node, quantity.index + quantity[0].length);
      if (new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1)
        found.push(`${quantity[0]} is on two lines in ${node.data.slice(0, 80)}`);
    }
  }
  return found;
})()"""
"""Texts that are too small, cut or lie on each other, legends of colours that no mark has, boxes that their content
leaves, empty halves, wrapped units."""


@dataclass
class OpenPage:
    """A page as Chromium has it."""

    browser: Browser
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    load_s: float = 0.0

    def evaluate(self, expression: str) -> Any:
        return self.browser.run(self.browser.evaluate(expression))

    def screenshot(self, path: Path) -> None:
        found = self.browser.run(self.browser.send("Page.captureScreenshot", captureBeyondViewport=True))
        path.write_bytes(base64.b64decode(found["data"]))

    def pdf(self) -> bytes:
        return base64.b64decode(self.browser.run(self.browser.send("Page.printToPDF"))["data"])


class Browser:
    """One tab over the DevTools protocol."""

    def __init__(self, address: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.number, self.page = 0, OpenPage(browser=self)
        self.loaded = asyncio.Event()
        self.run(self._connect(address))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, LIMIT_S))

    async def _connect(self, address: str) -> None:
        import aiohttp

        self.session = aiohttp.ClientSession()
        self.socket = await self.session.ws_connect(address, max_msg_size=0)
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.send(f"{domain}.enable")

    async def send(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        number = self.number
        await self.socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self.socket.receive()).data)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._event(message)

    def _event(self, message: dict[str, Any]) -> None:
        method, found = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.page.errors.append(found["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.page.errors.append(str(found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.page.errors.append(found["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.page.requests.append(found["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded.set()

    async def evaluate(self, expression: str) -> Any:
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, paper: bool = False
    ) -> OpenPage:
        return self.run(self._open(path, width=width, height=height, dark=dark, paper=paper))

    async def _open(self, path: Path, *, width: int, height: int, dark: bool, paper: bool) -> OpenPage:
        self.page = OpenPage(browser=self)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme], media="print" if paper else "")
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        begun = time.perf_counter()
        self.loaded.clear()
        await self.send("Page.navigate", url=path.resolve().as_uri())
        while not self.loaded.is_set():
            self._event(json.loads((await self.socket.receive()).data))
        # Two frames later everything is laid out and painted.
        await self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")
        self.page.load_s = time.perf_counter() - begun
        return self.page

    def close(self) -> None:
        self.run(self.socket.close())
        self.run(self.session.close())
        self.loop.close()


@contextmanager
def open_browser() -> Iterator[Browser]:
    """A browser with a profile of its own; skips the test where no Chromium is installed."""
    program = next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no Chromium is installed ({', '.join(NAMES)})")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            browser = Browser(_address(Path(profile), process))
            yield browser
            browser.close()
        finally:
            process.terminate()
            process.wait(timeout=LIMIT_S)


def _address(profile: Path, process: subprocess.Popen[bytes]) -> str:
    """The address of the first tab, once Chromium has written its port."""
    from urllib.request import urlopen

    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end and process.poll() is None:
        try:
            port = (profile / "DevToolsActivePort").read_text().splitlines()[0]
            with urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = [t for t in json.load(answer) if t["type"] == "page"]
            return tabs[0]["webSocketDebuggerUrl"]
        except (OSError, IndexError):
            time.sleep(0.1)
    pytest.skip(f"Chromium did not start (exit status {process.poll()})")
