"""Every time in an answer of Canopy's routes is an epoch time or an age, and its name shows which."""

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from reference_docs import routes
from support.chunk_client import ON
from support.prompts import token_ids

NAME_OF_A_TIME = re.compile(r"(^|_)(time|at|since|date|stamp|when|clock|ago)(_|$)")
WITHIN_S = 600.0
"""A test takes less."""
PAGES = {"/canopy/ui", "/canopy/page.js", "/canopy/page.css", "/canopy/uPlot.iife.min.js"}
PAGES |= {"/canopy/uPlot.min.css"}


def numbers(answer: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield each number with the name of its nearest key."""
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield from numbers(value, key)
    elif isinstance(answer, list):
        for value in answer:
            yield from numbers(value, name)
    elif isinstance(answer, (int, float)) and not isinstance(answer, bool):
        yield name, answer


def wrong(answer: Any) -> list[tuple[str, float]]:
    """Return the numbers that are times, and have no name that shows which."""
    epoch, monotonic, found = time.time(), time.monotonic(), []
    for name, value in numbers(answer):
        is_epoch = abs(value - epoch) < WITHIN_S
        if is_epoch or name.endswith("_unix_s"):
            right = is_epoch and name.endswith("_unix_s")
        elif name.endswith("_ago_s"):
            right = 0.0 <= value < WITHIN_S
        else:
            clock = isinstance(value, float) and abs(value - monotonic) < WITHIN_S / 10
            right = not clock and not (NAME_OF_A_TIME.search(name) and name.endswith("_s"))
            right = right and NAME_OF_A_TIME.fullmatch(name) is None
        if not right:
            found.append((name, value))
    return found


def test_wrong_names_and_clocks_are_found() -> None:
    now, clock = time.time(), time.monotonic()
    for answer in (
        {"time": 3.0},
        {"a": [{"made_at_s": 1.0}]},
        {"end": now},
        {"last_use": clock - 5.5},
        {"clock_unix_s": clock},
        {"clock_ago_s": now},
    ):
        assert wrong(answer), answer
    assert not wrong({"a_unix_s": now - 3, "b_ago_s": 0.5, "uptime_s": 3.0, "rows": [1, 2.5]})


@pytest.mark.long
def test_each_route_names_its_times(server, smollm2) -> None:
    listed = {
        (method, path)
        for method, path in re.findall(r"\| (\w+) \| `(\S+)` \|", routes())
        if path not in PAGES
    }
    asked = set()
    flags = ("--radix-eviction", "wa", "--canopy-session-gate", "auto", "--canopy-queue-order")
    flags += ("bounded-shortest", *(one for one in ON if one not in ("--radix-eviction", "wa")))
    with server(smollm2, *flags, kv_tokens=2048) as client:

        def ask(method: str, path: str, body: Any = None, route: str = "") -> Any:
            asked.add((method, route or path.partition("?")[0]))
            raw = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(
                client.url + path, raw, {"Content-Type": "application/json"}, method=method
            )
            with urllib.request.urlopen(request, timeout=120) as answer:
                found = json.loads(answer.read() or b"null")
            assert wrong(found) == [], path
            return found

        for seed in range(6):
            params = {"canopy_conversation": f"c{seed % 2}", "canopy_turn": 1 + seed // 2}
            client.generate(token_ids(700, seed), 4, params)
        ask("POST", "/canopy/hint", {"conversation": "c0", "over": True})
        ask("DELETE", "/canopy/documents")
        time.sleep(2.5)  # reports are made once a second
        assert ask("GET", "/canopy/explain?conversation=c0")["replicas"][0][0]
        status = ask("GET", "/canopy/status")
    named = {name for name, _ in numbers(status)}
    assert {"time_unix_s", "clock_ago_s"} <= named
    assert asked == listed
