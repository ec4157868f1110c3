"""Documents in the HTTP process: check a request's fields and bound its documents.

The prompt's tokens stay those that SGLang makes. A ``CanopyError`` raised here is a ``ValueError``,
which SGLang answers with status 400; only wrong fields raise it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from canopy_documents.server.options import ReuseOptions
from canopy_documents.text import chat, fields
from canopy_documents.text.documents import find_documents, split_texts
from canopy_documents.text.order import arrange_ids, has_fixed_positions, has_other_input, orders
from sglang_canopy.errors import CanopyError
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire.stamp import BOUNDS, DOCUMENTS, ORDER

_PREPARED = "canopy_documents_prepared"
"""Set on a chat request whose fields and documents are handled."""

_RENDERED_ROUTES = ("/v1/responses", "/api/chat")
"""Path suffixes of the routes whose chats SGLang renders without the hook :func:`convert_chat`."""

_ADVICE = (
    'send them as text parts of a chat message with custom_params {"canopy_documents": "parts"}, or '
    "between separators"
)


def prepare(
    manager: Any,
    obj: Any,
    options: ReuseOptions,
    path: str = "",
    body: Mapping[str, Any] | None = None,
) -> None:
    """Hook before ``TokenizerManager.generate_request``: check fields, find and bound documents.

    ``path``, ``body``: of the HTTP request, if any.
    """
    if not hasattr(obj, "sampling_params") or getattr(obj, _PREPARED, False):
        return
    _check_spelling(body or {})
    obj.sampling_params = {} if obj.sampling_params is None else obj.sampling_params
    if path.endswith(_RENDERED_ROUTES):
        _bound_rendered(manager, obj, options, body or {})
    elif isinstance(obj.text, list) or _is_batch(obj.input_ids):
        _prepare_batch(manager, obj, options)
    elif isinstance(obj.sampling_params, dict):
        prompt = obj.text, obj.input_ids
        ids = _prepare_prompt(manager, options, obj, prompt, obj.sampling_params, _tenant_of(obj))
        if ids is not obj.input_ids:
            obj.text, obj.input_ids = None, ids


def check_body(body: Mapping[str, Any], obj: Any) -> None:
    """Check the fields of a body before its response starts.

    ``obj``: its sampling parameters. Raises CanopyError.
    """
    _check_spelling(body)
    ids: Any = body.get("input_ids")
    prompts = ids if _is_batch(ids) else [ids]
    params = obj.sampling_params
    params_list = params if isinstance(params, list) else [params] * len(prompts)
    for prompt, prompt_params in zip(itertools.cycle(prompts), params_list):
        if isinstance(prompt_params, Mapping):
            _check_fields(fields.parse_fields(prompt_params.get("custom_params")), prompt)


def _prepare_batch(manager: Any, obj: Any, options: ReuseOptions) -> None:
    """Prepare each prompt of a batch. If one prompt becomes ids, all do."""
    texts, id_lists = obj.text, obj.input_ids
    count = len(texts if texts is not None else id_lists)
    params = obj.sampling_params
    params_list = params if isinstance(params, list) else [dict(params) for _ in range(count)]
    if len(params_list) < count or not all(isinstance(sampling, dict) for sampling in params_list):
        raise CanopyError(
            f"sampling_params must be one object, or a list of one for each of {count} prompts"
        )
    keys, salts = (_field_by_prompt(obj, name, count) for name in ("extra_key", "cache_salt"))
    prompts = list(zip(texts or [None] * count, id_lists or [None] * count))
    ids = [
        _prepare_prompt(manager, options, obj, prompt, sampling, tenant_of(*pair))
        for prompt, sampling, *pair in zip(prompts, params_list, keys, salts)
    ]
    obj.sampling_params = params_list
    if any(new is not old for new, (_, old) in zip(ids, prompts)):
        encode = manager.tokenizer.encode
        pairs = zip(ids, prompts)
        obj.input_ids = [encode(text) if new is None else new for new, (text, _) in pairs]
        obj.text = None


def _prepare_prompt(
    manager: Any,
    options: ReuseOptions,
    obj: Any,
    prompt: tuple[str | None, Any],
    params: dict[str, Any],
    tenant: str | None,
) -> Any:
    """Write a prompt's bounds into its sampling parameters. Returns its ids: as given, unless they
    were reordered, or made from a text with documents."""
    (text, ids), custom = prompt, params.get("custom_params")
    requested = fields.parse_fields(custom)
    _check_fields(requested, ids)
    may_reorder = requested.any_order and not has_fixed_positions(obj)
    if requested.bounds is not None:
        if may_reorder:
            ids, bounds = arrange_ids(manager.tokenizer, list(ids), requested.bounds, tenant)
            params["custom_params"] = {**(custom or {}), BOUNDS: bounds}
        return ids
    separator = options.separator
    if requested.off or separator is None or manager.tokenizer is None:
        return ids
    if not isinstance(text, str) or text.count(separator) < 2:
        return ids
    if may_reorder:
        text = chat.reorder_text(text, separator, orders, tenant)
    ids = manager.tokenizer.encode(text)
    bounds = find_documents(manager.tokenizer, split_texts(text, separator), ids)
    params["custom_params"] = {**(custom or {}), BOUNDS: bounds}
    return ids


def convert_chat(
    original: Any, serving: Any, request: Any, options: ReuseOptions, raw_request: Any = None
) -> Any:
    """Hook around ``OpenAIServingChat._convert_to_internal_request``: bound a chat's documents."""
    manager, custom = serving.tokenizer_manager, request.custom_params
    _check_spelling(getattr(raw_request, "_json", None) or {})
    if request.input_ids is not None:  # SGLang renders no messages: ``prepare`` reads the bounds
        return original(serving, request, raw_request)
    requested = fields.parse_fields(custom)
    in_parts, separator = requested.documents_in_parts, options.separator
    _check_fields(requested, None, chat=True)
    if requested.any_order and not requested.off and not has_fixed_positions(request):
        request.messages = chat.reorder_messages(
            request.messages, in_parts, separator, orders, _tenant_of(request)
        )
    adapted, processed = original(serving, request, raw_request)
    setattr(adapted, _PREPARED, True)
    if not requested.off:
        texts = chat.documents_of_chat(request.messages, in_parts, separator)
        _write_bounds(manager, adapted, texts)
    return adapted, processed


def _bound_rendered(manager: Any, obj: Any, options: ReuseOptions, body: Mapping[str, Any]) -> None:
    """Bound the documents of a chat that SGLang has rendered from an HTTP body."""
    if isinstance(obj.sampling_params, dict):
        messages = chat.messages_of_body(body)
        _write_bounds(manager, obj, chat.documents_of_chat(messages, False, options.separator))


def _write_bounds(manager: Any, obj: Any, texts: Sequence[str]) -> None:
    """Write the bounds of a rendered chat's documents into its request."""
    ids, params = obj.input_ids, obj.sampling_params
    custom = params.get("custom_params") or {}
    kept_params = {key: custom[key] for key in custom if key not in (DOCUMENTS, ORDER)}
    if texts and isinstance(ids, list) and not has_other_input(obj):
        kept_params[BOUNDS] = find_documents(manager.tokenizer, texts, ids)
    if kept_params != custom:
        params["custom_params"] = kept_params


def _check_spelling(body: Mapping[str, Any]) -> None:
    """Raise CanopyError for Cohere's ``documents``: SGLang would answer without them."""
    if isinstance(body, Mapping) and body.get("documents"):
        raise CanopyError(f"documents: this server reads no such field; {_ADVICE}")


def _check_fields(requested: fields.DocumentFields, ids: Any, chat: bool = False) -> None:
    """Raise CanopyError if a prompt's fields do not fit it."""
    if requested.documents_in_parts and not chat:
        raise CanopyError(f"custom_params key {DOCUMENTS!r} is of chat messages; {_ADVICE}")
    if requested.bounds is None:
        return
    if ids is None:
        raise CanopyError(
            f"custom_params key {BOUNDS!r} counts tokens, so the prompt must be given as "
            "input_ids; with text use a separator"
        )
    fields.check_inside(requested.bounds, len(ids))


def _tenant_of(obj: Any) -> str | None:
    """Return the tenant of a single prompt."""
    return tenant_of(_tenant_field(obj.extra_key), _tenant_field(obj.cache_salt))


def _tenant_field(value: Any) -> str | None:
    """Return the tenant field of a single prompt. SGLang refuses other types than text later."""
    return value if isinstance(value, str) else None


def _field_by_prompt(obj: Any, name: str, count: int) -> list[str | None]:
    """Return a tenant field per prompt of a batch. Raises CanopyError if the number differs."""
    value = getattr(obj, name)
    if not isinstance(value, list):
        return [_tenant_field(value)] * count
    if len(value) != count:
        raise CanopyError(
            f"{name} has {len(value)} entries for {count} prompts; give one string, or one per prompt"
        )
    return [_tenant_field(item) for item in value]


def _is_batch(ids: Any) -> bool:
    return isinstance(ids, list) and bool(ids) and isinstance(ids[0], list)
