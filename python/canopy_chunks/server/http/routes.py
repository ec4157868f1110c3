"""``/canopy/chunks``: register, list, pin and delete documents ahead of time.

``POST /canopy/chunks`` ``{"text": ..., "cache_salt": ..., "pin": false}`` returns an ``id``;
``[[canopy:ID]]`` in a prompt stands for that document. The HTTP process stores the tokens; the
scheduler encodes and stores the KV. A document belongs to the tenant that registered it. As in
SGLang's requests, ``extra_key`` and ``cache_salt`` name the tenant: in the body, in the query, or
in headers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from canopy_chunks.server.http import calls, entry
from canopy_chunks.server.http.limits import DocumentLimits
from canopy_chunks.server.options import Options
from canopy_chunks.text.documents import Document, document_name
from canopy_chunks.text.find import inner
from sglang_canopy.errors import CanopyError
from sglang_canopy.request import access
from sglang_canopy.request.sent import tenant_fields
from sglang_canopy.tenant import tenant_of

MAX_BODY_BYTES = 16 << 20
_FIELDS = {"text": str, "input_ids": list, "extra_key": str, "cache_salt": str, "pin": bool}
_WHAT = {"input_ids": "a list of token ids", "pin": "true or false"}

limits = DocumentLimits()


def add_routes(server_args: Any, options: Options) -> None:
    """Hook before ``launch_server``: add the routes of chunk reuse to SGLang's."""
    from sglang.srt.entrypoints.http_server import app

    global limits
    entry.documents.share = options.tenant_share
    limits = DocumentLimits(is_on=not server_args.admin_api_key)

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
    """Register a document and encode it. Raises CanopyError for an invalid document."""
    body = await _body(request)
    ids = document_ids(body, manager, options)
    fields = tenant_fields(request, body)
    tenant = tenant_of(**fields)
    limits.register(tenant)
    name = entry.documents.add(ids, tenant)
    least = max(options.min_tokens, manager.server_args.page_size or 1)
    found = options.find == "on" and entry.finder.add(tuple(ids), tenant, least)
    await _delete_removed(manager)
    await calls.encode(manager, inner(tuple(ids)) if found else ids, fields)
    if not entry.documents.has(name, tenant):
        await _command(manager, "delete", Document(tuple(ids), tenant))
        raise CanopyError(f"document {name[:12]} was deleted or displaced during its registration")
    if body.get("pin") and await _command(manager, "pin", entry.documents.get(name, tenant)):
        entry.documents.get(name, tenant).pinned = True
    pinned = entry.documents.get(name, tenant).pinned
    return {"id": name, "tokens": len(ids), "mark": f"[[canopy:{name}]]", "pinned": pinned}


async def _delete_removed(manager: Any) -> None:
    """Delete the documents that a new document displaced, and their KV."""
    while entry.documents.removed:
        document = entry.documents.removed.pop()
        entry.finder.remove(document.ids, document.tenant)
        await _command(manager, "delete", document)


async def listing(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Return the requesting tenant's registered documents, and the store's counters."""
    tenant = tenant_of(**tenant_fields(request))
    state = await limits.counters(lambda: calls.state(manager))
    return {
        "documents": [
            {"id": name, "tokens": len(d.ids), "pinned": d.pinned}
            for name, d in entry.documents.of(tenant).items()
        ],
        "server": state,
    }


async def delete(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Delete a document and its KV in every version."""
    name, tenant = request.path_params["name"], tenant_of(**tenant_fields(request))
    entry.documents.get(name, tenant)
    limits.change(tenant)
    document = entry.documents.remove(name, tenant)
    entry.finder.remove(document.ids, tenant)
    return {"deleted": name, "kv_deleted": await _command(manager, "delete", document)}


async def pin(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Protect the document's stored KV from eviction."""
    return await _pin(request, manager, True)


async def unpin(request: Any, manager: Any, _options: Options) -> dict[str, Any]:
    """Undo ``pin``."""
    return await _pin(request, manager, False)


def document_ids(body: dict[str, Any], manager: Any, options: Options) -> list[int]:
    """Return the tokens of a document to register. Raises CanopyError naming the fault."""
    for key, value in body.items():
        if key not in _FIELDS:
            raise CanopyError(f"unknown field {key[:40]!r}; allowed are {', '.join(_FIELDS)}")
        if not isinstance(value, _FIELDS[key]):
            raise CanopyError(f"field {key!r} must be {_WHAT.get(key, 'a string')}")
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
            f"the document has {len(ids)} tokens; at least {options.min_tokens} are required "
            "(min_tokens of --canopy-chunks)"
        )
    longest = manager.model_config.context_len - 2
    if len(ids) > longest:
        raise CanopyError(
            f"the document has {len(ids)} tokens, this model's context holds {longest}; split it"
        )
    longest = options.longest_prompt(manager.model_config.context_len) - 2
    if len(ids) > longest:
        raise CanopyError(
            f"the document has {len(ids)} tokens, prompts with documents hold {longest}; split it, "
            "or serve with a larger prompt_tokens of --canopy-chunks"
        )
    return list(ids)


async def _pin(request: Any, manager: Any, wanted: bool) -> dict[str, Any]:
    name, tenant = request.path_params["name"], tenant_of(**tenant_fields(request))
    document = entry.documents.get(name, tenant)
    if document.pinned == wanted:
        raise CanopyError(f"document {name[:12]} is {'pinned already' if wanted else 'not pinned'}")
    limits.change(tenant)
    done = await _command(manager, "pin" if wanted else "unpin", document)
    if wanted and not done:
        raise CanopyError(
            f"document {name[:12]} was not pinned: it has no KV stored yet (try again in a moment), "
            "or the room for pinned documents is used up (unpin others)"
        )
    document.pinned = wanted
    return {"id": name, "pinned": wanted}


async def _command(manager: Any, verb: str, document: Document) -> bool:
    """Apply a command to both KV versions of a document: for marks, and for found documents."""
    kept = {document.ids, inner(document.ids)}
    names = [document_name(ids, document.tenant) for ids in kept if ids]
    return await calls.command(manager, verb, names, document.tenant)


async def _body(request: Any) -> dict[str, Any]:
    body = await access.read_json(request, MAX_BODY_BYTES, "a document")
    if not isinstance(body, dict):
        raise CanopyError('the body must be a JSON object like {"text": "..."}')
    return body


def _manager() -> Any:
    from sglang.srt.entrypoints import http_server

    return http_server._global_state.tokenizer_manager
