"""``canopy top page``: a server's page in this machine's browser, with the key that the server wants."""

from __future__ import annotations

import argparse
import os
import webbrowser

from canopy_lab.top.page_proxy import proxy
from sglang_canopy.errors import CanopyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("CANOPY_API_KEY"),
        help="the server's --api-key (default: $CANOPY_API_KEY)",
    )
    parser.add_argument("--port", type=int, default=0, help="of this machine (default: a free one)")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def run(args: argparse.Namespace) -> int:
    """Returns 0 after Ctrl-C. Raises ``CanopyError`` for a port that is taken."""
    if not args.url.startswith(("http://", "https://")):
        raise CanopyError(f"--url must be like http://127.0.0.1:30000, got {args.url!r:.80}")
    try:
        server = proxy(args.url, args.api_key, args.port)
    except (OSError, OverflowError) as error:
        raise CanopyError(f"--port {args.port}: {error}") from None
    address = f"http://127.0.0.1:{server.server_address[1]}/canopy/ui"
    print(f"{address}   (Ctrl-C ends it)", flush=True)
    if not args.no_browser:
        webbrowser.open(address)
    with server:
        server.serve_forever()
    return 0
