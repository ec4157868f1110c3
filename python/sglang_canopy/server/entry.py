"""Where a request enters the server: what the client said is checked, the rest inferred.

Runs in the HTTP process. The hooks around SGLang's request conversion call these functions;
a ``CanopyError`` is a ``ValueError``, which SGLang answers with status 400.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sglang_canopy.config.gate import NOTE as GATE_NOTE
from sglang_canopy.request import breakpoints, owner
from sglang_canopy.request import retention as ranges
from sglang_canopy.request.client_hints import ClientHints
from sglang_canopy.request.fields import FIELDS, client_fields
from sglang_canopy.request.identity import Identities
from sglang_canopy.request.infer import infer_from_chat
from sglang_canopy.request.owner import RequireTenant, settle
from sglang_canopy.request.retention import MAX_RANGES, Retention
from sglang_canopy.request.retention_sources import CACHE_CONTROL, asked
from sglang_canopy.request.sent import body_of, headers_of, metadata_fields
from sglang_canopy.request.stamp import MARKER_KEY, RETENTION_KEY, STAMP_KEY, make_stamp
from sglang_canopy.request.tools import TOOLS_KEY, to_wire
from sglang_canopy.reuse.ttft import TtftFit
from sglang_canopy.server.gate_http import see_to_time
from sglang_canopy.telemetry.ttft_hour import TtftHour
from sglang_canopy.tenant import tenant_of

logger = logging.getLogger(__name__)

hint_rule = ClientHints()
"""Whose hints are heeded; ``routes.add_routes`` sets what the server was started with."""

identities = Identities()
"""Which names of conversations count; set likewise."""

retention_sources: tuple[str, ...] = ()
"""Which fields of other systems' clients say how long a path stays; set likewise."""

require_tenant = RequireTenant()
"""What becomes of requests without a tenant; set likewise."""

tool_labels = False
"""Whether the policy wants to know which tool an answer calls; set likewise."""

farewells = False
"""Whether a chat whose last message takes leave is a category of its own; set likewise."""

carriers = owner.NO_CARRIERS
"""Where else a tenant and our keys may stand; set likewise."""

ttft_fit = TtftFit()
"""TTFT ~ alpha * uncached tokens + beta over the requests this process served."""

ttft_hour = TtftHour(time.time)
"""What their clients waited for the first token, over the last hour."""


def chat_converted(
    result: Any, self: Any, request: Any, raw_request: Any = None, *_: Any, **__: Any
) -> None:
    """After ``OpenAIServingChat._convert_to_internal_request``."""
    adapted, _processed = result
    inferred = infer_from_chat(request, farewells)
    stamp(adapted, inferred, raw_request, _breakpoints(self, adapted, raw_request))
    if getattr(request, "tools", None):
        marker = _tool_marker(self, request)
        if marker:
            custom = adapted.sampling_params["custom_params"]
            custom[MARKER_KEY] = marker
            if tool_labels:
                custom[TOOLS_KEY] = _tools(self, request)


def completion_converted(
    result: Any, _self: Any, _request: Any, raw_request: Any = None, *_: Any, **__: Any
) -> None:
    """After ``OpenAIServingCompletion._convert_to_internal_request``."""
    stamp(result[0], {"category": "completion"}, raw_request)


def generation_begins(
    original: Any, self: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Around ``TokenizerManager.generate_request``: every route comes through here."""
    if hasattr(obj, "sampling_params"):  # requests for embeddings have none
        stamp(obj, {"category": "generate"}, request)
    if getattr(self.server_args, GATE_NOTE, None) is not None:
        see_to_time(self)
    return original(self, obj, request, *args, **kwargs)


def stamp(
    obj: Any,
    inferred: dict[str, Any],
    request: Any = None,
    retention: Sequence[Retention] = (),
) -> None:
    """Check and stamp the sampling parameters of one request, or of a batch of them.

    ``request``: the HTTP request that it came with, if any. ``retention``: what it asks for parts
    of its prompt, beside what its body says for itself. A request that is stamped already (by
    the route it came through) is left as it is. Hints that its headers do not entitle to are left
    out.
    """
    if getattr(obj, "canopy_stamped", False):
        return
    obj.canopy_stamped = True
    if obj.sampling_params is None:
        obj.sampling_params = {}
    params = obj.sampling_params
    headers, body = headers_of(request), body_of(request)
    settle(obj, request, carriers)
    warning = require_tenant.check(obj, headers)
    if warning is not None:
        logger.warning("canopy: %s", warning)
    said = metadata_fields(body, _CHECKS) if owner.IN_METADATA in carriers else {}
    if isinstance(params, list):
        for one, found in zip(params, _retained(obj, body, retention, len(params)), strict=True):
            if isinstance(one, dict):
                custom = _with(one.get("custom_params"), said)
                one["custom_params"] = _stamped(custom, inferred, found, headers)
    elif isinstance(params, dict):
        found = _retained(obj, body, retention, 1)[0] | _identity(obj, body, headers)
        custom = _with(params.get("custom_params"), said)
        params["custom_params"] = _stamped(custom, inferred, found, headers)


_CHECKS = {key: check for key, (_, check) in FIELDS.items()}


def _with(custom: Any, said: dict[str, Any]) -> Any:
    """``custom_params`` with what ``metadata`` says; the former wins."""
    return {**said, **custom} if said and isinstance(custom, Mapping) else custom or said or None


def _retained(
    obj: Any, body: Mapping[str, Any], retention: Sequence[Retention], requests: int
) -> list[dict[str, Any]]:
    """Which parts of its path each request of a batch asks to keep, as fields of its stamp: by the
    body, by what a call without one says as well, and of a list of envelopes each by its own."""
    bodies: list[Mapping[str, Any]] = [body]
    if retention_sources:
        own = {name: getattr(obj, name, None) for name in ("priority", "kv_hints")}
        said = {**{name: value for name, value in own.items() if value is not None}, **body}
        hints = said.get("kv_hints")
        each = hints if isinstance(hints, list) and len(hints) == requests else [hints]
        bodies = [{**said, "kv_hints": _plain(one)} for one in each]
    found = []
    for one in bodies:
        wishes = ranges.to_wire([*asked(retention_sources, one), *retention][:MAX_RANGES])
        found.append({"retain": wishes} if wishes else {})
    return found if len(found) == requests else found * requests


def _plain(envelope: Any) -> Any:
    """An envelope as JSON has it; SGLang has a class for it."""
    return msgspec.to_builtins(envelope) if isinstance(envelope, msgspec.Struct) else envelope


def _identity(
    obj: Any, body: Mapping[str, Any], headers: Mapping[str, str] | None
) -> dict[str, Any]:
    """Which conversation a request says that it belongs to, beside our own fields."""
    rid, extra_key, salt = (getattr(obj, n, None) for n in ("rid", "extra_key", "cache_salt"))
    if not (isinstance(extra_key, str | None) and isinstance(salt, str | None)):
        return {}  # a batch of several tenants
    own = {"session_id": getattr(obj, "session_id", None), "rid": rid}  # of calls without a body
    return identities.fields({**own, **body}, headers or {}, rid, tenant_of(extra_key, salt))


def _stamped(
    custom: Any,
    inferred: dict[str, Any],
    found: dict[str, Any],
    headers: Mapping[str, str] | None,
) -> dict[str, Any]:
    """``custom_params`` with the stamp in it. ``found``: what fields that are not ours say."""
    fields = client_fields(custom)
    if "conversation" in fields:
        found = {key: value for key, value in found.items() if key == "retain"}
    fields = hint_rule.allowed({**found, **fields}, headers)
    retain = fields.pop("retain", None)
    made = make_stamp(inferred, fields, time.monotonic(), hint_rule.source(headers))
    line = ttft_fit.line()
    if line is not None:
        made["alpha"], made["beta"] = line
    carried = {key: value for key, value in (custom or {}).items() if key not in _NOT_CARRIED}
    if retain is not None:
        carried[RETENTION_KEY] = retain
    return {**carried, STAMP_KEY: made}


_NOT_CARRIED = (RETENTION_KEY, "canopy_retain")
"""What no client may write, and what SGLang cannot carry."""


def _breakpoints(serving: Any, adapted: Any, request: Any) -> list[Retention]:
    """What ``cache_control`` on parts of a chat's body asks for."""
    tokenizer = serving.tokenizer_manager.tokenizer if CACHE_CONTROL in retention_sources else None
    if tokenizer is None:
        return []

    def prompt() -> str:
        text = getattr(adapted, "text", None)
        return text if isinstance(text, str) else tokenizer.decode(adapted.input_ids)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return breakpoints.find(body_of(request), prompt, count)


def first_token(result: Any, state: Any, recv_obj: Any, i: int) -> None:
    """After ``TokenizerManager._get_scheduler_first_token_time``, once a request.

    Feeds the TTFT line with the request's prefill time in the scheduler, queueing left out; and the
    last hour's times with what the client waited, queueing included. ``result``: when the token
    was there, if that is before now.
    """
    created = state.time_stats.created_time
    if created > 0.0:
        ttft_hour.add((result or time.perf_counter()) - created)
    if recv_obj.time_stats is None:
        return
    times = recv_obj.time_stats[i]
    seconds = times.prefill_finished_time - times.forward_entry_time
    if times.forward_entry_time > 0.0 and seconds > 0.0:
        ttft_fit.add(recv_obj.prompt_tokens[i] - recv_obj.cached_tokens[i], seconds)


def _tools(serving: Any, request: Any) -> list[int]:
    """How the names of the tools offered begin in tokens."""
    tokenizer = serving.tokenizer_manager.tokenizer
    offered = (getattr(getattr(tool, "function", None), "name", None) for tool in request.tools)
    names = [name for name in offered if isinstance(name, str)]
    return to_wire(names, lambda text: tokenizer.encode(text, add_special_tokens=False))


def _tool_marker(serving: Any, request: Any) -> list[int]:
    """Token ids with which the model opens a tool call, if its parser has such a marker."""
    parser = getattr(serving, "tool_call_parser", None)
    tokenizer = serving.tokenizer_manager.tokenizer
    if not parser or tokenizer is None:
        return []
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser(request.tools, parser).detector
    text = (getattr(detector, "bot_token", "") or "").strip()
    return tokenizer.encode(text, add_special_tokens=False) if text else []
