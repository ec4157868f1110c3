"""``canopy page``: a server's page in this machine's browser, with the server's key."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass

from canopy_lab.cli.shared import ServerOptions
from canopy_lab.live.page.proxy import proxy
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class Options(ServerOptions):
    port: int = declare(0, "--port", "of this machine", metavar="PORT", shown_default="a free one")
    no_browser: bool = declare(False, "--no-browser", "only print the address")


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
    if not args.no_browser:
        webbrowser.open(address)
    with server:
        server.serve_forever()
    return 0
