"""``canopy explain``: the location of a conversation's KV, and the reason of its last eviction."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from canopy_lab.cli.shared import ServerOptions
from canopy_lab.live.top.explained import fetch, lines
from sglang_canopy.declared import declare


@dataclass(frozen=True, slots=True)
class Options(ServerOptions):
    conversation: str = declare(None, "CONVERSATION", "its name, as in its requests")
    extra_key: str | None = declare(
        None, "--extra-key", "the tenant's, as in its requests", metavar="KEY"
    )
    cache_salt: str | None = declare(
        None, "--cache-salt", "the tenant's, as in its requests", metavar="SALT"
    )
    json: bool = declare(False, "--json", "the whole answer, for scripts")


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Return 0. Raises ``CanopyError`` for a server that does not answer."""
    answer = fetch(args.url, args.conversation, args.key, args.extra_key, args.cache_salt)
    if args.json:
        json.dump(answer, sys.stdout, indent=1)
        print()
        return 0
    for line in lines(answer):
        print(line)
    return 0
