"""``canopy explain``: where a conversation's KV is, and why the last of it went."""

from __future__ import annotations

import argparse
import json
import os
import sys

from canopy_lab.top.explained import fetch, lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--conversation", required=True, metavar="ID", help="as in canopy_conversation"
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:30000", help="the server (default: %(default)s)"
    )
    parser.add_argument(
        "--api-key",
        default=os.environ.get("CANOPY_API_KEY"),
        help="the server's --api-key, or the administrator's to look at every tenant "
        "(default: $CANOPY_API_KEY)",
    )
    parser.add_argument("--extra-key", metavar="KEY", help="the tenant's, as in its requests")
    parser.add_argument("--cache-salt", metavar="SALT", help="the tenant's, as in its requests")
    parser.add_argument("--json", action="store_true", help="the whole answer, for scripts")


def run(args: argparse.Namespace) -> int:
    """Returns 0. Raises ``CanopyError`` for a server that does not answer."""
    answer = fetch(args.url, args.conversation, args.api_key, args.extra_key, args.cache_salt)
    if args.json:
        json.dump(answer, sys.stdout, indent=1)
        print()
        return 0
    for line in lines(answer):
        print(line)
    return 0
