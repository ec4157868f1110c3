"""A refused request is answered with 429 even if the route has begun a stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, StreamingResponse

from sglang_canopy.request.early_refusal import message, retry_after_s
from sglang_canopy.server.http import early_refusal

REASON = message(5.0, 7)


def answer(refused: bool, text: str = "a") -> dict[str, Any]:
    reason = {"type": "abort", "status_code": 429, "message": REASON} if refused else None
    return {"text": text, "meta_info": {"finish_reason": reason}}


async def answers(*refused: bool) -> AsyncIterator[Any]:
    for one in refused:
        yield answer(one)


def application(*refused: bool, raises: bool = False, kind: str = "text/event-stream") -> Any:
    """An application that streams, and writes a head before its first answer, or raises."""
    app = FastAPI()

    @app.exception_handler(HTTPException)
    async def shaped(_request: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse({"said": error.detail}, error.status_code)

    async def events() -> AsyncIterator[str]:
        yield "created "
        async for one in early_refusal.watched(answers(*refused)):
            yield one["text"]
        yield " done"

    async def raising() -> AsyncIterator[Any]:
        raise HTTPException(429, REASON)
        yield

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events(), media_type=kind)

    @app.post("/whole")
    async def whole() -> JSONResponse:
        if raises:
            try:
                await anext(early_refusal.watched(raising()))
            except HTTPException as error:  # as SGLang's routes, which drop headers
                return JSONResponse({"said": error.detail}, 500)
        return JSONResponse({"text": "a"})

    early_refusal.add(app)
    return app


def post(app: Any, path: str) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def receive() -> Any:
        if not any(m["type"] == "http.response.body" and not m.get("more_body") for m in sent):
            await asyncio.sleep(0.001)
            return {"type": "http.request", "body": b"", "more_body": False}
        return {"type": "http.disconnect"}

    async def send(one: Any) -> None:
        sent.append(one)

    scope = {
        **{"type": "http", "method": "POST", "path": path, "raw_path": path.encode()},
        **{"query_string": b"", "headers": [], "http_version": "1.1", "scheme": "http"},
        **{"server": ("t", 1), "client": ("c", 2), "root_path": "", "asgi": {"version": "3.0"}},
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    heads = [one for one in sent if one["type"] == "http.response.start"]
    assert len(heads) == 1, sent
    body = b"".join(one.get("body", b"") for one in sent if one["type"] == "http.response.body")
    return heads[0]["status"], dict(heads[0]["headers"]), body


@pytest.mark.parametrize("kind", ["text/event-stream", "application/x-ndjson"])
def test_a_stream_that_has_begun_is_replaced_by_the_refusal(kind) -> None:
    status, headers, body = post(application(True, kind=kind), "/stream")
    assert (status, headers[b"retry-after"]) == (429, b"7")
    assert REASON.encode() in body
    assert b"created" not in body


@pytest.mark.parametrize("refused", [(False,), (False, True), ()])
def test_another_stream_is_passed_on_whole(refused) -> None:
    status, headers, body = post(application(*refused), "/stream")
    assert (status, b"retry-after" in headers) == (200, False)
    assert body == b"created " + b"a" * len(refused) + b" done"


def test_an_answer_of_another_status_becomes_429() -> None:
    status, headers, _ = post(application(raises=True), "/whole")
    assert (status, headers[b"retry-after"]) == (429, b"7")
    status, headers, body = post(application(), "/whole")
    assert (status, body) == (200, b'{"text":"a"}')


def test_the_time_to_wait_is_read_from_the_text_and_from_no_other() -> None:
    assert retry_after_s(message(5.0, 600)) == 600
    assert retry_after_s(message(0.25, 1)) == 1
    assert retry_after_s("retry after 90000000 s; no") == 1


def test_a_refused_prompt_of_a_batch_does_not_wait_for_the_others() -> None:
    async def some() -> AsyncIterator[Any]:
        yield answer(True)
        await asyncio.sleep(100)
        yield answer(False)

    app = FastAPI()

    @app.exception_handler(HTTPException)
    async def shaped(_request: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse({"said": error.detail}, error.status_code)

    async def events() -> AsyncIterator[str]:
        async for one in early_refusal.watched(some()):
            yield one["text"]

    @app.post("/stream")
    async def stream() -> StreamingResponse:
        return StreamingResponse(events(), media_type="text/event-stream")

    early_refusal.add(app)
    status, headers, _ = post(app, "/stream")
    assert (status, headers[b"retry-after"]) == (429, b"7")
