"""The page: its files are unchanged, its proxy forwards reads alone, and a browser shows it."""

import contextlib
import hashlib
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from canopy_lab.cli.page import proxy
from sglang_canopy.errors import CanopyError
from sglang_canopy.telemetry import static_files
from sglang_canopy.telemetry.window import MAX_POINTS, MINUTE_S, Window

STATIC = Path(static_files.__file__).parent / "static"
FIXTURE = Path(__file__).parents[1] / "fixtures" / "page.json"
PAGE_FIXTURE: dict[str, Any] = json.loads(FIXTURE.read_text())
"""An answer of ``/canopy/status``, without its hours."""
STATUS = PAGE_FIXTURE["status"]
STATUS["ttft_hour"] = [
    {"time_unix_s": 1.8e9 + 60 * minute, "requests": 9, "p50_s": 0.2, "p99_s": 0.4 + minute % 3}
    for minute in range(60)
]
STATUS["ranks"][0]["hour"] = [
    {
        "time_unix_s": 1.8e9 + 60 * minute,
        "prompt_tokens": 1000,
        "hit_tokens": {"device": 300 + 9 * minute, "host": 100},
        "evicted_tokens": {"capacity": 50 + minute, "ttl": minute % 7, "trim": 0, "quota": 0},
    }
    for minute in range(60)
]


@contextlib.contextmanager
def run_server(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def canopy_server(key: str | None = None) -> ThreadingHTTPServer:
    """Return a server of Canopy's page, whose status is the fixture's."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.partition("?")[0].removeprefix("/canopy/")
            if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
                return self.answer(401, b'{"error": "Unauthorized"}', "application/json")
            if name == "status":
                return self.answer(200, json.dumps(STATUS).encode(), "application/json")
            content, content_type = static_files.read_file("index.html" if name == "ui" else name)
            return self.answer(200, content, content_type, static_files.HEADERS)

        def answer(self, code: int, body: bytes, content_type: str, headers: Any = ()) -> None:
            self.send_response(code)
            for header, value in {"Content-Type": content_type, **dict(headers)}.items():
                self.send_header(header, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


class PageAnswer(NamedTuple):
    code: int
    body: bytes
    headers: Any


def fetch(url: str, **headers: str) -> PageAnswer:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as answer:
            return PageAnswer(answer.status, answer.read(), answer.headers)
    except urllib.error.HTTPError as error:
        return PageAnswer(error.code, error.read(), error.headers)


def test_vendored_files_are_unchanged() -> None:
    (library,) = json.loads((STATIC / "vendored.json").read_text()).values()
    for name, digest in library["files"].items():
        assert "sha256:" + hashlib.sha256((STATIC / name).read_bytes()).hexdigest() == digest
    assert "MIT License" in (STATIC / "uPlot.LICENSE").read_text()
    assert f"v{library['version']}" in (STATIC / "uPlot.iife.min.js").read_text()[:300]


def test_the_page_loads_nothing_from_other_sites_and_builds_no_markup_from_text() -> None:
    for name in ("index.html", "page.js", "page.css"):
        text = (STATIC / name).read_text()
        assert not re.search(r"https?://|//cdn|@import", text), name
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", text), name
    assert "default-src 'none'" in static_files.HEADERS["Content-Security-Policy"]


def test_only_files_of_the_page_are_served() -> None:
    for name in static_files.FILES:
        content, _ = static_files.read_file(name)
        assert content
    with pytest.raises(CanopyError, match="no file"):
        static_files.read_file("../static_files.py")


def test_the_proxy_adds_the_key_and_forwards_only_reads_under_canopy() -> None:
    with run_server(canopy_server("secret")) as url, run_server(proxy(url, "secret")) as proxy_url:
        assert fetch(url + "/canopy/ui").code == 401
        code, body, headers = fetch(proxy_url + "/canopy/ui")
        assert (code, headers["Content-Security-Policy"][:19]) == (200, "default-src 'none';")
        assert b"<title>Canopy</title>" in body
        assert json.loads(fetch(proxy_url + "/canopy/status").body)["version"] == "9.9"
        assert fetch(proxy_url + "/flush_cache").code == 404
        # A page of another site whose name resolves to the proxy is not answered.
        assert fetch(proxy_url + "/canopy/status", Host="evil.example").code == 404
    with run_server(canopy_server("secret")) as url, run_server(proxy(url, "wrong")) as proxy_url:
        assert fetch(proxy_url + "/canopy/status").code == 401


def test_the_hour_has_whole_minutes_and_the_current_one() -> None:
    hour = Window(MINUTE_S)
    for second in range(int(MINUTE_S) * (MAX_POINTS + 5) + 30):
        sums = {"hit_tokens": {"device": second // 2}, "evicted_tokens": {"capacity": 1}}
        hour.add(float(second), 1e9 + second, {"prompt_tokens": second, **sums})
    points = [*hour.points(), *hour.since_last_point()]
    assert len(points) == MAX_POINTS + 1
    assert {point["prompt_tokens"] for point in points[:-1]} == {60}
    assert points[0]["hit_tokens"] == {"device": 30}
    assert points[-1]["prompt_tokens"] == 29
    assert points[-1]["evicted_tokens"] == {"capacity": 0}


def render_page(tmp_path: Path) -> str:
    """Return the page's elements as a browser has them once they are filled."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("no chromium here; Debian has it as the package chromium")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1500")
    output_flags = (f"--user-data-dir={tmp_path}", "--virtual-time-budget=6000", "--dump-dom")
    with run_server(canopy_server()) as url:
        process = subprocess.run(
            [browser, *flags, *output_flags, url + "/canopy/ui"],
            capture_output=True,
            text=True,
            timeout=180,
            check=True,
        )
    return process.stdout


def hidden_sections(dom: str) -> set[str]:
    return set(re.findall(r'<section[^>]* hidden="">\s*<h2>([^<]*)', dom))


@pytest.mark.long
def test_a_browser_shows_what_to_do_first_and_then_every_part(tmp_path: Path) -> None:
    dom = render_page(tmp_path)
    for text in (
        "Keep wa: no policy tried would save more.",
        "41.0&nbsp;% ±&nbsp;0.8",
        "−6.0 ±&nbsp;0.8",
        "+12.0&nbsp;% ±&nbsp;2.0",
        "58.0&nbsp;% ±&nbsp;0.8",
        "system prompt",
        "60.0 %",
        "4.32k",
        "777",
        "98.8k",
        "2 h",
        "4.00&nbsp;MB",
        "9.00&nbsp;kB in memory",
        "123 ms for each 1,000 new tokens",
        "99 in 100 below",
        "not reused: lora",
    ):
        assert text in dom, text
    assert dom.index("Keep wa") < dom.index("<h2>")
    assert dom.count('class="u-wrap"') == 4  # hits, times to first token, evictions, curves
    assert hidden_sections(dom) == {"Cached by tenant"}  # only the public tenant exists
    assert "&lt;img src=x onerror=alert(1)&gt;" in dom
    assert "<img" not in dom
    assert "no news" not in dom
