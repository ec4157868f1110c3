"""``canopy page``: a server's page in this machine's browser, with the server's key.

A browser cannot send a key when it opens an address, so a local address that requires none forwards
to the server. Only reads under ``/canopy/`` are forwarded, and only if the request's Host is this
address, so that another page cannot use it.
"""

from __future__ import annotations

import urllib.error
import urllib.request
import webbrowser
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from canopy_lab.cli.shared import ConnectionOptions
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError

TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 16 << 20
_FORWARDED_HEADERS = ("X-Canopy-Extra-Key", "X-Canopy-Cache-Salt")
_RETURNED_HEADERS = (
    *("Content-Type", "Content-Security-Policy", "X-Content-Type-Options", "Referrer-Policy"),
    "Cache-Control",
)


def proxy(url: str, api_key: str | None, port: int = 0) -> ThreadingHTTPServer:
    """Return a server on loopback; ``port`` 0 takes a free port. Call ``serve_forever``."""
    url = url.rstrip("/")

    class PageHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            own_address = f"127.0.0.1:{self.connection.getsockname()[1]}"
            if self.headers.get("Host") != own_address or not self.path.startswith("/canopy/"):
                self._answer(404, b"not here", {})
                return
            request = urllib.request.Request(url + self.path)
            if api_key:
                request.add_header("Authorization", f"Bearer {api_key}")
            for name in _FORWARDED_HEADERS:
                if self.headers.get(name):
                    request.add_header(name, self.headers[name])
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    self._answer(response.status, response.read(MAX_ANSWER_BYTES), response.headers)
            except urllib.error.HTTPError as error:
                self._answer(error.code, error.read(MAX_ANSWER_BYTES), error.headers)
            except OSError as error:
                self._answer(502, f'{{"error": "{type(error).__name__}"}}'.encode(), {})

        def _answer(self, code: int, body: bytes, headers: Any) -> None:
            self.send_response(code)
            for name in _RETURNED_HEADERS:
                if headers.get(name):
                    self.send_header(name, headers[name])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    return ThreadingHTTPServer(("127.0.0.1", port), PageHandler)


@dataclass(frozen=True, slots=True)
class Options(ConnectionOptions):
    port: int = declare(0, "--port", "of this machine", metavar="PORT", shown_default="a free one")


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Return 0 after Ctrl-C. Raises ``CanopyError`` for a port in use."""
    if not args.url.startswith(("http://", "https://")):
        raise CanopyError(f"--url must be like http://127.0.0.1:30000, got {args.url!r:.80}")
    try:
        server = proxy(args.url, args.key, args.port)
    except (OSError, OverflowError) as error:
        raise CanopyError(f"--port {args.port}: {error}") from None
    address = f"http://127.0.0.1:{server.server_address[1]}/canopy/ui"
    print(f"{address}   (Ctrl-C ends it)", flush=True)
    webbrowser.open(address)
    with server:
        server.serve_forever()
    return 0
