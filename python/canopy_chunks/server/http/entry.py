"""Chunk reuse in the HTTP process: find, tokenise and bound documents before they reach the
scheduler.

A ``CanopyError`` raised here is a ``ValueError``, which SGLang answers with status 400.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from canopy_chunks.server.options import Options
from canopy_chunks.text import any_order, chat_parts, fields
from canopy_chunks.text.documents import (
    MARK,
    Documents,
    Piece,
    check_marks,
    replace_marks,
    split_at_signs,
    split_documents,
    tokenise,
    with_bounds,
)
from canopy_chunks.text.find import Finder
from canopy_chunks.text.listed import FIELD, listed_texts
from canopy_chunks.text.order import anything
from sglang_canopy.errors import CanopyError
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire.document_names import BOUNDS, DOCUMENTS

documents = Documents()
"""Documents registered at ``/canopy/chunks`` of this process."""

finder = Finder()
"""The same documents by their tokens, to find them in prompts without marks."""

_PREPARED = "canopy_chunks_prepared"
"""Set on a chat request whose fields and documents are handled."""

_RENDERED = ("/v1/responses", "/api/chat")
"""Path suffixes of the routes whose chats SGLang renders without the hook :func:`convert_chat`."""

_TEXT_FIELDS = ("text", "prompt", "messages", "input", "instructions", "system")


def prepare(manager: Any, obj: Any, options: Options, path: str = "") -> None:
    """Hook before ``TokenizerManager.generate_request``: check fields, find and bound documents.

    ``path``: of the HTTP request, if any.
    """
    if not hasattr(obj, "sampling_params") or getattr(obj, _PREPARED, False):
        return
    if path.endswith(_RENDERED) and _prepare_rendered(manager, obj, options):
        return
    if options.find == "on" and any_order.has_other_input(obj):
        options = replace(options, find="off")
    fixed = any_order.has_fixed_positions(obj)
    if isinstance(obj.text, list) or _is_batch(obj.input_ids):
        _prepare_batch(manager, obj, options, fixed)
        return
    params = obj.sampling_params = {} if obj.sampling_params is None else obj.sampling_params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    tenant = _tenant(obj)
    check_marks([(obj.text, tenant)], documents)
    ids, custom = _prepare_prompt(manager, options, obj.text, obj.input_ids, custom, tenant, fixed)
    if ids is not obj.input_ids:
        obj.text, obj.input_ids = None, ids
    if custom is not None and isinstance(params, dict):
        params["custom_params"] = custom


def check_body(tp_size: int, body: Mapping[str, Any], obj: Any) -> None:
    """Check the marks and fields of a body before its response starts.

    ``obj``: its tenant and sampling parameters. Raises CanopyError. The marks of a batch with a tenant
    for each prompt are not checked.
    """
    ids: Any = body.get("input_ids")
    prompts = ids if _is_batch(ids) else [ids]
    params = obj.sampling_params
    many = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, one in zip(itertools.cycle(prompts), many):
        if isinstance(one, Mapping):
            _check_fields(fields.parse_fields(one.get("custom_params")), prompt, tp_size)
    if not any(isinstance(getattr(obj, n, None), list) for n in ("extra_key", "cache_salt")):
        text = json.dumps([body.get(field) for field in _TEXT_FIELDS])
        check_marks([(text, _tenant(obj))], documents)


def _prepare_batch(manager: Any, obj: Any, options: Options, fixed: bool) -> None:
    """Prepare each prompt of a batch. If one prompt becomes ids, all do."""
    texts, lists = obj.text, obj.input_ids
    count = len(texts if texts is not None else lists)
    params = obj.sampling_params
    many = params if isinstance(params, list) else [dict(params or {}) for _ in range(count)]
    if len(many) != count or not all(isinstance(one, dict) for one in many):
        raise CanopyError(
            f"sampling_params must be one object, or a list of one for each of {count} prompts"
        )
    keys, salts = (_for_each(obj, name, count) for name in ("extra_key", "cache_salt"))
    tenants = [tenant_of(*pair) for pair in zip(keys, salts)]
    check_marks(zip(texts or (), tenants), documents)
    changed, new_ids = False, []
    for i in range(count):
        custom = many[i].get("custom_params")
        ids, custom = _prepare_prompt(
            manager,
            options,
            texts[i] if texts is not None else None,
            lists[i] if lists is not None else None,
            custom,
            tenants[i],
            fixed,
        )
        changed |= ids is not (lists[i] if lists is not None else None)
        new_ids.append(ids)
        if custom is not None:
            many[i]["custom_params"] = custom
    obj.sampling_params = many
    if changed:
        encode = manager.tokenizer.encode
        obj.input_ids = [
            ids if ids is not None else encode(texts[i]) for i, ids in enumerate(new_ids)
        ]
        obj.text = None


def _prepare_prompt(
    manager: Any,
    options: Options,
    text: str | None,
    ids: Any,
    custom: Any,
    tenant: str | None,
    fixed: bool,
) -> tuple[Any, dict[str, Any] | None]:
    """Return one prompt's ids, and its new ``custom_params`` or None.

    The ids are as given unless they were made or reordered here. With ``fixed`` positions, no
    document is moved.
    """
    requested = fields.parse_fields(custom)
    requested = replace(requested, any_order=requested.any_order and not fixed)
    _check_fields(requested, ids, manager.server_args.tp_size)
    if requested.bounds is not None:
        if not requested.any_order:
            return ids, None
        ids, bounds = any_order.arranged(
            manager.tokenizer, requested, list(ids), requested.bounds, tenant
        )
        return ids, {**custom, BOUNDS: bounds}
    if text is None or not isinstance(text, str) or manager.tokenizer is None:
        return ids, _found(options, requested, ids, custom, tenant)
    separated = options.separator is not None and text.count(options.separator) > 1
    if not MARK.search(text) and (requested.off or not separated):
        if options.find == "on" and not requested.off:
            ids = manager.tokenizer.encode(text)
            bounded = _found(options, requested, ids, custom, tenant)
            return (None, None) if bounded is None else (ids, bounded)
        return ids, None
    pieces = split_documents(text, None if requested.off else options.separator, documents, tenant)
    found, bounds = tokenise(manager.tokenizer, pieces)
    if requested.off:
        return found, None
    found, bounds = any_order.arranged(
        manager.tokenizer, requested, found, fields.check_bounds(bounds), tenant
    )
    return found, with_bounds(custom, bounds)


def _check_fields(requested: fields.ChunkFields, ids: Any, tp_size: int) -> None:
    """Raise CanopyError if a prompt's fields do not fit it, or the server."""
    fields.check_selector(requested.selector, tp_size)
    if requested.bounds is None:
        return
    if ids is None:
        raise CanopyError(
            f"custom_params key {BOUNDS!r} counts tokens, so the prompt must be given as "
            "input_ids; with text use a separator or /canopy/chunks"
        )
    fields.check_inside(requested.bounds, len(ids))


def _found(
    options: Options, requested: fields.ChunkFields, ids: Any, custom: Any, tenant: str | None
) -> dict[str, Any] | None:
    """Return ``custom_params`` with the bounds of registered documents in a plain prompt's tokens.

    ``None`` if searching is off or finds no document.
    """
    if options.find == "off" or requested.off or not isinstance(ids, list):
        return None
    try:
        bounds = finder.find(ids, tenant, fields.MAX_CHUNKS)
    except (
        TypeError,
        ValueError,
        OverflowError,
    ):  # not token ids: SGLang refuses them with its own message
        return None
    return with_bounds(custom, bounds) if bounds else None


def convert_chat(
    original: Any, serving: Any, request: Any, options: Options, raw_request: Any = None
) -> Any:
    """Hook around ``OpenAIServingChat._convert_to_internal_request``: find documents in chats.

    Document parts are enclosed in unguessable markers before the chat template is applied;
    afterwards the markers show the documents' positions. Separators and registered documents need
    no markers.
    """
    manager = serving.tokenizer_manager
    requested = fields.parse_fields(getattr(request, "custom_params", None))
    fields.check_selector(requested.selector, manager.server_args.tp_size)
    separator = None if requested.off else options.separator
    in_parts = _add_listed(request, raw_request) or requested.documents_in_parts
    signs = None if requested.off else chat_parts.mark(request, in_parts)
    if signs is None and not _has_documents(request, separator):
        return original(serving, request, raw_request)
    adapted, processed = original(serving, request, raw_request)
    text, tenant = _rendered(manager.tokenizer, adapted), _tenant(adapted)
    check_marks([(text, tenant)], documents)
    if signs is None:
        pieces = split_documents(text, separator, documents, tenant)
    elif signs[0] in text:
        pieces = replace_marks(split_at_signs(text, *signs), documents, tenant)
    else:
        raise CanopyError(_NO_TEMPLATE)
    _write_documents(manager, adapted, pieces, requested, in_parts)
    return adapted, processed


def _prepare_rendered(manager: Any, obj: Any, options: Options) -> bool:
    """Bound the documents of a chat that SGLang has rendered. Returns whether it has any."""
    ids, tokenizer = obj.input_ids, manager.tokenizer
    if tokenizer is None or not isinstance(ids, list) or any_order.has_other_input(obj):
        return False
    requested = fields.parse_fields(obj.sampling_params.get("custom_params"))
    fields.check_selector(requested.selector, manager.server_args.tp_size)
    separator = None if requested.off else options.separator
    text, tenant = _decoded(tokenizer, ids), _tenant(obj)
    if not MARK.search(text) and (separator is None or text.count(separator) < 2):
        return False
    _check_round_trip(tokenizer, text, ids)
    check_marks([(text, tenant)], documents)
    pieces = split_documents(text, separator, documents, tenant)
    _write_documents(manager, obj, pieces, requested, in_parts=False)
    return True


def _write_documents(
    manager: Any,
    adapted: Any,
    pieces: Sequence[Piece],
    requested: fields.ChunkFields,
    in_parts: bool,
) -> None:
    """Write the tokens of a chat's ``pieces``, and the documents' bounds, into its request."""
    ids, bounds = tokenise(manager.tokenizer, pieces, specials=False)
    custom = adapted.sampling_params.get("custom_params")
    if not requested.off:
        checked = fields.check_bounds(bounds)
        fixed = any_order.has_fixed_positions(adapted)
        requested = replace(requested, any_order=requested.any_order and not fixed)
        # a message's parts are joined by line breaks
        joins = functools.partial(any_order.is_blank, manager.tokenizer) if in_parts else anything
        ids, bounds = any_order.arranged(
            manager.tokenizer, requested, ids, checked, _tenant(adapted), joins
        )
        custom = with_bounds(custom, bounds)
        custom.pop(DOCUMENTS, None)
    adapted.text, adapted.input_ids = None, ids
    adapted.sampling_params["custom_params"] = custom
    setattr(adapted, _PREPARED, True)


_NO_TEMPLATE = (
    "chat_template_kwargs.documents: this model's chat template shows no documents; send them as "
    'text parts with custom_params {"canopy_documents": "parts"}'
)


def _add_listed(request: Any, raw_request: Any) -> bool:
    """Insert the body's top-level ``documents`` before the first user's text, as parts.

    There they keep their position from turn to turn. SGLang's request class drops the field, so it
    is read from the HTTP body. Returns whether the body has documents.
    """
    texts = listed_texts(getattr(raw_request, "_json", None))
    if not texts:
        return False
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageContentTextPart as Part

    messages = list(request.messages)
    users = [i for i, m in enumerate(messages) if getattr(m, "role", None) == "user"]
    if not users:
        raise CanopyError(
            f"{FIELD} are inserted before a user's text; add a message of role 'user'"
        )
    message = messages[users[0]]
    own = message.content
    own = [Part(type="text", text=own)] if isinstance(own, str) else own
    content = [*(Part(type="text", text=text) for text in texts), *own]
    messages[users[0]] = message.model_copy(update={"content": content})
    request.messages = messages
    return True


def _has_documents(request: Any, separator: str | None) -> bool:
    """Return whether a message has separators or the mark of a registered document."""
    for message in request.messages:
        content = getattr(message, "content", None)
        texts = [content] if isinstance(content, str) else content or []
        for part in texts:
            text = part if isinstance(part, str) else getattr(part, "text", None) or ""
            if MARK.search(text) or (separator is not None and separator in text):
                return True
    return False


def _rendered(tokenizer: Any, adapted: Any) -> str:
    """Return the prompt's text with special tokens. Raises CanopyError unless ids round-trip."""
    if isinstance(adapted.text, str):
        return adapted.text
    ids = list(adapted.input_ids or [])
    text = _decoded(tokenizer, ids)
    _check_round_trip(tokenizer, text, ids)
    return text


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _check_round_trip(tokenizer: Any, text: str, ids: list[int]) -> None:
    if list(tokenizer.encode(text, add_special_tokens=False)) != ids:
        raise CanopyError(
            "this model's tokenizer does not reproduce a chat's text from its ids, so documents "
            "cannot be found in it; use /v1/completions, or input_ids with canopy_chunks"
        )


def _tenant(obj: Any) -> str | None:
    """Return the tenant of a single prompt."""
    fields = (getattr(obj, name, None) for name in ("extra_key", "cache_salt"))
    return tenant_of(*map(_one_string, fields))


def _one_string(value: Any) -> str | None:
    """Return the tenant field of a single prompt. SGLang refuses other types than text later."""
    return value if isinstance(value, str) else None


def _for_each(obj: Any, name: str, count: int) -> list[str | None]:
    """Return a tenant field per prompt of a batch. Raises CanopyError if the number differs."""
    value = getattr(obj, name, None)
    if not isinstance(value, list):
        return [_one_string(value)] * count
    if len(value) != count:
        raise CanopyError(
            f"{name} has {len(value)} entries for {count} prompts; give one string, or one per prompt"
        )
    return [_one_string(one) for one in value]


def _is_batch(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
