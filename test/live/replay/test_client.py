"""Request bodies in each dialect, and replies read from streams."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

aiohttp = pytest.importorskip("aiohttp")

from aiohttp import web  # noqa: E402

from canopy_lab.live.replay import endpoint  # noqa: E402
from canopy_lab.live.replay.endpoint import DIALECTS, Reply, make_body  # noqa: E402


def reply_to(dialect: str, events: Sequence[Any], status: int = 200) -> Reply:
    """Return the client's reply for a server that streams ``events``."""

    async def main() -> Reply:
        async def handle(request: web.Request) -> web.StreamResponse:
            if status != 200:
                return web.Response(status=status, text="queue is full")
            response = web.StreamResponse()
            await response.prepare(request)
            for event in events:
                text = event if isinstance(event, str) else json.dumps(event)
                await response.write(f"data: {text}\n\n".encode())
            return response

        app = web.Application()
        app.router.add_post("/x", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        try:
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{port}/x"
                return await endpoint.send(session, url, DIALECTS[dialect], {}, {})
        finally:
            await runner.cleanup()

    return asyncio.run(main())


def event_of(tokens: list[int], **meta_info: Any) -> dict[str, Any]:
    return {"text": "t" * len(tokens), "output_ids": tokens,
            "meta_info": {"completion_tokens": len(tokens), "prompt_tokens": 9, **meta_info}}  # fmt: skip


def test_sglangs_stream_gives_ids_tiers_and_the_servers_queue() -> None:
    details = {"device": 3, "host": 2, "storage": 1, "storage_backend": "file"}
    last = event_of([4, 5, 6], cached_tokens=6, cached_tokens_details=details, queue_time=0.25)
    reply = reply_to("sglang", [event_of([4]), event_of([4, 5]), last, "[DONE]"])
    assert reply.is_complete
    assert (reply.output_ids, reply.output_tokens, reply.prompt_tokens) == ([4, 5, 6], 3, 9)
    assert (reply.cached_tokens, reply.by_tier) == (6, {"device": 3, "host": 2, "storage": 1})
    assert reply.server_queue_s == 0.25
    assert reply.first_s is not None
    assert reply.sent_s <= reply.first_s <= reply.done_s
    assert len(reply.gaps_s) == 2


def test_openais_stream_ends_with_the_usage_and_an_empty_list_of_choices() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    usage["prompt_tokens_details"] = {"cached_tokens": 4}
    events = [
        {"choices": [{"text": "a"}], "usage": None},
        {"choices": [{"text": "b"}]},
        {"choices": [], "sglext": {"cached_tokens_details": {"device": 4, "host": 0}}},
        {"choices": [], "usage": usage},
        "[DONE]",
    ]
    reply = reply_to("sglang-oai", events)
    assert (reply.text, reply.output_tokens, reply.prompt_tokens) == ("ab", 5, 9)
    assert (reply.cached_tokens, reply.by_tier["device"]) == (4, 4)
    assert len(reply.gaps_s) == 1


def test_an_unreported_cache_differs_from_no_hits() -> None:
    reply = reply_to("openai", [{"choices": [{"text": "a"}]}])
    assert reply.is_complete
    assert reply.cached_tokens is None


@pytest.mark.parametrize(
    ("events", "status", "reason"),
    [
        ([], 503, "503: queue is full"),
        ([{"error": {"message": "too long"}}], 200, "too long"),
        ([], 200, "no token"),
        ([event_of([1], finish_reason={"type": "abort", "message": "late"})], 200, "late"),
        (["{"], 200, "JSONDecodeError"),
    ],
)
def test_failures_are_replies_with_a_reason(events: list[Any], status: int, reason: str) -> None:
    reply = reply_to("sglang", events, status)
    assert not reply.is_complete
    assert reason in reply.error


def test_bodies_pin_the_output_and_carry_labels_only_where_understood() -> None:
    labels = {"canopy_turn": 2}
    options = {"sampling_params": {"top_p": 0.5}}
    sglang_body = make_body(DIALECTS["sglang"], "m", [1, 2], 7, labels, options)
    assert sglang_body["input_ids"] == [1, 2]
    assert sglang_body["sampling_params"] == {
        "temperature": 0, "max_new_tokens": 7, "ignore_eos": True, "custom_params": labels, "top_p": 0.5,
    }  # fmt: skip
    openai_body = make_body(DIALECTS["sglang-oai"], "m", [1, 2], 7, labels, {"user": "u"})
    assert (
        openai_body["prompt"],
        openai_body["custom_params"],
        openai_body["ignore_eos"],
        openai_body["user"],
    ) == ([1, 2], labels, True, "u")
    vllm_body = make_body(DIALECTS["vllm"], "m", [1, 2], 7, labels, {})
    assert "custom_params" not in vllm_body
    assert (vllm_body["min_tokens"], vllm_body["ignore_eos"]) == (7, True)
    plain_body = make_body(DIALECTS["openai"], "m", [1, 2], 7, labels, {})
    fields = {"model", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
    assert set(plain_body) == fields
