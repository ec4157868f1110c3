"""Two real workers behind the gateways that exist: tenants stay apart, hints reach both workers."""

import contextlib
import json
import time
import urllib.request
from typing import Any

import pytest

from canopy_lab.cli.main import main
from sglang_canopy.request.sent import METADATA
from support.gateways import MODULES, post, running, skip_without

ANSWER = 4
LONG = "The ants go marching one by one. " * 60


def chat(url: str, opening: str, salt: str | None = None, **more: Any) -> int:
    """Send a turn of the conversation ``OPENING-c``; return its cached prompt tokens."""
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"{opening}. {LONG}"}],
        "max_tokens": ANSWER,
        "temperature": 0,
        **more,
    }
    if salt is not None:
        body["metadata"] = {METADATA["cache_salt"]: salt, "user_id": f"u_session_{opening}-c"}
    status, answer = post(f"{url}/v1/chat/completions", body)
    assert status == 200, answer
    return (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)


def message(url: str, opening: str, salt: str) -> tuple[int, int]:
    """One turn on ``/v1/messages``. Returns its new and its cached prompt tokens."""
    body = {
        "model": "tiny",
        "system": [{"type": "text", "text": opening}, {"type": "text", "text": LONG}],
        "messages": [{"role": "user", "content": "Go on."}],
        "max_tokens": ANSWER,
        "cache_salt": salt,
    }
    status, answer = post(f"{url}/v1/messages", body)
    assert status == 200, answer
    usage = answer["usage"]
    return usage["input_tokens"], usage.get("cache_read_input_tokens", 0)


def said_to_be(url: str, conversation: str, salt: str) -> str | None:
    """Return the hint that a worker's policy received about a conversation: ``over`` or ``None``."""
    time.sleep(0.6)  # users get an explanation every half a second
    request = urllib.request.Request(
        f"{url}/canopy/explain?conversation={conversation}", headers={"X-Canopy-Cache-Salt": salt}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (found,) = json.load(answer)["replicas"][0]
    return found["belief"].get("said_to_be")


@pytest.mark.long
def test_tenants_stay_apart_and_hints_reach_both_workers(server, tiny_model, tmp_path) -> None:
    for gateway in MODULES:
        skip_without(gateway)
    flags = ("--radix-eviction", "wa", "--canopy-carriers", "metadata", "--enable-cache-report")
    flags += ("--served-model-name", "tiny")
    with contextlib.ExitStack() as stack:
        workers = [
            stack.enter_context(server(tiny_model, *flags, kv_tokens=16_384)) for _ in range(2)
        ]
        urls = [worker.url for worker in workers]
        for gateway in MODULES:
            url = stack.enter_context(running(gateway, urls, tmp_path / f"{gateway}.log"))
            for salt in ("a", "b"):
                # Round robin: the first two requests meet both workers.
                first = [chat(url, gateway, salt) for _ in urls]
                again = [chat(url, gateway, salt) for _ in urls]
                assert max(first) < 100, "another tenant's KV"
                assert min(again) > 300
            with pytest.MonkeyPatch.context() as environment:
                environment.setenv("CANOPY_CACHE_SALT", "a")
                assert main(["hint", f"{gateway}-c", "--over", "--url", ",".join(urls)]) == 0
            for one in urls:
                assert over_reaches(one, f"{gateway}-c", "a")
                assert said_to_be(one, f"{gateway}-c", "b") is None
        # The last gateway is smg, which has this route.
        for salt in ("a", "b"):
            assert max(message(url, "Messages", salt)[1] for _ in urls) < 100
            assert min(message(url, "Messages", salt)[1] for _ in urls) > 300
        # sglang-router drops the salt in the body: the worker logs that once.
        router = stack.enter_context(running("sglang-router", urls, tmp_path / "router.log"))
        for _ in range(4):
            chat(router, "Dropped", cache_salt="d")
        for worker in workers:
            assert worker.server.log_text().count("names no tenant") == 1


def over_reaches(url: str, conversation: str, salt: str) -> bool:
    """Poll until the hint arrives, or until a timeout."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if said_to_be(url, conversation, salt) == "over":
            return True
    return False
