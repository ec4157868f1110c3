"""``/canopy/chunks``: documents registered, listed, pinned and deleted ahead of time.

``POST /canopy/chunks`` ``{"text": ..., "extra_key": ..., "pin": false}`` answers with an ``id``;
``[[canopy:ID]]`` in a prompt is that document. The HTTP process keeps the tokens, the scheduler
encodes and keeps the KV.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from sglang_canopy import access
from sglang_canopy.chunk.server import entry
from sglang_canopy.chunk.server.fields import BOUNDS
from sglang_canopy.chunk.server.options import ATTRIBUTE, Options
from sglang_canopy.errors import CanopyError

MAX_BODY_BYTES = 16 << 20
_FIELDS = {"text": str, "input_ids": list, "extra_key": str, "pin": bool}
_WHAT = {"text": "a string", "input_ids": "a list of token ids", "extra_key": "a string"}


def add_routes(server_args: Any) -> None:
    """Before ``launch_server``: the routes of chunk reuse, beside SGLang's."""
    from sglang.srt.entrypoints.http_server import app

    options: Options = getattr(server_args, ATTRIBUTE)

    def called(handler: Callable[..., Awaitable[dict]]) -> access.Handler:
        async def call(request: Any) -> dict[str, Any]:
            return await handler(request, _manager(), options)

        return call

    access.add_read_route(app, "GET", "/canopy/chunks", called(listing), server_args.admin_api_key)
    for path, handler, method in (
        ("/canopy/chunks", register, "POST"),
        ("/canopy/chunks/{name}", delete, "DELETE"),
        ("/canopy/chunks/{name}/pin", pin, "POST"),
        ("/canopy/chunks/{name}/unpin", unpin, "POST"),
    ):
        access.add_change_route(app, method, path, called(handler))


async def register(request: Any, manager: Any, options: Options) -> dict[str, Any]:
    """Register a document, have it encoded. Raises CanopyError for what cannot be one."""
    body = await _body(request)
    ids = document_ids(body, manager, options)
    salt = body.get("extra_key", "")
    name = entry.documents.add(ids, salt)
    await _encode(manager, ids, salt)
    if body.get("pin"):
        entry.documents.get(name, salt).pinned = True
        await _command(manager, "pin", name)
    return {"id": name, "tokens": len(ids), "mark": f"[[canopy:{name}]]"}


async def listing(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Registered documents of an ``extra_key`` (query parameter), and the store's counters."""
    salt = request.query_params.get("extra_key", "")
    state = await _state(manager)
    return {
        "documents": [
            {"id": name, "tokens": len(d.ids), "pinned": d.pinned}
            for name, d in entry.documents.by_id.items()
            if d.salt == salt
        ],
        "server": {k: v for k, v in state.items() if k != "stored"},
    }


async def delete(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Forget a document and its KV in every version."""
    name, salt = _named(request)
    entry.documents.remove(name, salt)
    return {"deleted": name, "kv_deleted": await _command(manager, "delete", name)}


async def pin(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Keep the document's stored KV from being evicted."""
    return await _pin(request, manager, True)


async def unpin(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Undo ``pin``."""
    return await _pin(request, manager, False)


def document_ids(body: dict[str, Any], manager: Any, options: Options) -> list[int]:
    """The tokens of a document to register. Raises CanopyError naming what is wrong."""
    for key, value in body.items():
        if key not in _FIELDS:
            raise CanopyError(f"unknown field {key[:40]!r}; allowed are {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise CanopyError(f"field {key!r} must be {_WHAT.get(key, 'true or false')}")
    if ("text" in body) == ("input_ids" in body):
        raise CanopyError("a document is either text or input_ids; give one of them")
    if "text" in body:
        if not body["text"].isascii() and any("\ud800" <= c <= "\udfff" for c in body["text"]):
            raise CanopyError(
                "field 'text' has half of a surrogate pair, which is no text; remove it"
            )
        ids = manager.tokenizer.encode(body["text"], add_special_tokens=False)
    else:
        ids = body["input_ids"]
        most = manager.model_config.vocab_size
        if any(type(t) is not int or not 0 <= t < most for t in ids):
            raise CanopyError(f"field 'input_ids' must be a list of token ids below {most}")
    if len(ids) < options.min_tokens:
        raise CanopyError(
            f"the document has {len(ids)} tokens; at least {options.min_tokens} are worth keeping "
            "(--canopy-chunk-min-tokens)"
        )
    longest = manager.model_config.context_len - 2
    if len(ids) > longest:
        raise CanopyError(
            f"the document has {len(ids)} tokens, this model's context holds {longest}; split it"
        )
    return list(ids)


async def _encode(manager: Any, ids: list[int], salt: str) -> None:
    """An ordinary request of one token whose prompt is the document: the scheduler learns it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    asked = GenerateReqInput(
        input_ids=[*ids, ids[-1]],
        sampling_params={
            "max_new_tokens": 1,
            "temperature": 0,
            "custom_params": {BOUNDS: [0, len(ids)]},
        },
        extra_key=salt or None,
    )
    async for _ in manager.generate_request(asked, None):
        pass


async def _pin(request: Any, manager: Any, wanted: bool) -> dict[str, Any]:
    name, salt = _named(request)
    document = entry.documents.get(name, salt)
    if document.pinned == wanted:
        raise CanopyError(f"document {name[:12]} is {'pinned already' if wanted else 'not pinned'}")
    done = await _command(manager, "pin" if wanted else "unpin", name)
    if wanted and not done:
        raise CanopyError(f"document {name[:12]} has no KV stored yet; try again in a moment")
    document.pinned = wanted
    return {"id": name, "pinned": wanted}


async def _command(manager: Any, verb: str, name: str) -> bool:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    asked = SetInternalStateReq(server_args={f"canopy_chunk:{verb}:{name}": 1})
    return any(bool(answer) for answer in await manager.set_internal_state(asked))


async def _state(manager: Any) -> dict[str, Any]:
    return (await manager.get_internal_state())[0].get("canopy_chunks", {})


async def _body(request: Any) -> dict[str, Any]:
    body = await access.read_json(request, MAX_BODY_BYTES, "a document")
    if not isinstance(body, dict):
        raise CanopyError('the body must be a JSON object like {"text": "..."}')
    return body


def _named(request: Any) -> tuple[str, str]:
    return request.path_params["name"], request.query_params.get("extra_key", "")


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager
