"""Entry of requests: read the client's fields, infer the others, and stamp the request.

Runs in the HTTP process. Hooks on SGLang's request conversion call these functions. A wrong hint is
ignored and counted. A ``CanopyError``, as for a wrong tenant, is a ``ValueError``, for which SGLang
returns status 400.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sglang_canopy.config.server_options import RequestOptions, options_of
from sglang_canopy.policy.registry import live_names
from sglang_canopy.request import kv_hints, prompt, sent
from sglang_canopy.request.client_hints import HintRule, rule_of
from sglang_canopy.request.identity import find_conversation
from sglang_canopy.request.infer import infer_from_chat, infer_from_route
from sglang_canopy.request.sent import (
    RequireTenant,
    body_of,
    headers_of,
    index_headers,
    read_dropped_params,
    read_metadata,
    request_path,
    set_tenant,
)
from sglang_canopy.reuse.ttft import TtftFit
from sglang_canopy.server.http.clock_ticker import start_ticker
from sglang_canopy.telemetry.metrics import Metrics
from sglang_canopy.telemetry.series import IGNORED_METRICS
from sglang_canopy.telemetry.window import TtftHour
from sglang_canopy.wire.stamp import (
    CLIENT_FIELDS,
    FORCED_CALL,
    PARAMS_ADDED,
    STAMP_KEY,
    client_fields,
    make_stamp,
)

logger = logging.getLogger(__name__)


class HttpState:
    """Request options and credentials of one HTTP process, and measurements of its requests.

    ``hint_rule``: decides which clients' hints count; without it no credential is known.
    ``metric_labels``: the operator's labels of every series, ``None`` without metrics.
    """

    def __init__(
        self,
        options: RequestOptions,
        hint_rule: HintRule | None = None,
        metric_labels: Mapping[str, str] | None = None,
    ) -> None:
        self.hint_rule = hint_rule or HintRule(options.client_hints)
        self.require_tenant = RequireTenant(options.require_tenant)
        self.tenant_carriers = options.carriers
        self.ignored_fields: Counter[str] = Counter()
        """Ignored fields by name, since the start; unknown names count as ``OTHER_FIELDS``."""
        self._metric_labels = metric_labels
        self._metrics: Metrics | None = None
        self.ttft_fit = TtftFit()
        """Fit prefill seconds, without queueing, ~ alpha * uncached tokens + beta over this process's requests."""
        self.ttft_hour = TtftHour(time.time)
        """Clients' waits for the first token in the last hour."""

    def count_ignored(self, name: str, error: str, count: int = 1) -> None:
        """Count a wrong field, in metrics too; log the first of each name."""
        name = name if name in CLIENT_FIELDS or name == KV_HINTS else OTHER_FIELDS
        if not self.ignored_fields[name]:
            logger.warning("canopy: %s is ignored (logged once): %s", name, error)
        self.ignored_fields[name] += count
        if self._metric_labels is None:
            return
        if self._metrics is None:  # SGLang has set the folder of the series by now
            self._metrics = Metrics(0, self._metric_labels, metrics=IGNORED_METRICS)
        self._metrics.export_status({"ignored_fields": dict(self.ignored_fields)})


KV_HINTS, OTHER_FIELDS = "kv_hints", "other"

http_state = HttpState(RequestOptions())
"""Options of this process: defaults until ``set_options`` replaces them by the server's. The defaults do
not depend on the environment: an error here would keep SGLang from loading the plugin."""


def set_options(server_args: Any) -> HttpState:
    """Apply the server's options, before it serves. Raises ``CanopyError`` for an invalid secret, and
    for the hint mode ``trusted`` without a key or secret."""
    global http_state
    options = options_of(server_args).requests
    labels = None
    if getattr(server_args, "enable_metrics", False):
        labels = server_args.extra_metric_labels or {}
    hint_rule = rule_of(options.client_hints, server_args.admin_api_key)
    http_state = HttpState(options, hint_rule, labels)
    return http_state


def stamp_chat(
    result: Any, self: Any, request: Any, raw_request: Any = None, *_: Any, **__: Any
) -> None:
    """Hook after ``OpenAIServingChat._convert_to_internal_request``."""
    adapted, _processed = result
    parser_field = tool_parser_field(self.tool_call_parser, request.tools, request.tool_choice)
    stamp_request(adapted, infer_from_chat(request) | parser_field, raw_request)


def drop_billing_line(serving: Any, request: Any, *_: Any, **__: Any) -> None:
    """Hook before ``AnthropicServing._convert_to_chat_completion_request``."""
    server_args = serving.openai_serving_chat.tokenizer_manager.server_args
    strips_billing_line = options_of(server_args).requests.strip_billing_line == "on"
    if strips_billing_line and server_args.radix_eviction_policy in live_names():
        prompt.strip_billing_line(request)


def stamp_generation(
    original: Any, self: Any, obj: Any, request: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Hook around ``TokenizerManager.generate_request``, which every route calls."""
    if hasattr(obj, "sampling_params"):  # missing in requests for embeddings
        prompt.check_sizes(obj)
        if not hasattr(obj, "canopy"):
            path, body = request_path(request), body_of(request)
            inferred = infer_from_route(path, body)
            if path.endswith("/v1/responses"):
                parser = self.config_value("tool_call_parser")
                inferred |= tool_parser_field(parser, body.get("tools"), body.get("tool_choice"))
            stamp_request(obj, inferred, request)
    options = options_of(self.server_args)
    if options.gate is not None:
        start_ticker(self)
    return original(self, obj, request, *args, **kwargs)


def _read_releases(obj: Any) -> list[dict[str, Any]]:
    """Return the fields set by the ``kv_hints`` of a request, or of each request in a batch."""
    envelopes = getattr(obj, "kv_hints", None)
    fields: list[dict[str, Any]] = []
    for envelope in envelopes if isinstance(envelopes, list) else [envelopes]:
        has_release, ignored_actions = kv_hints.read_envelope(envelope)
        if ignored_actions:
            error = "the known action is kv.release, version 1.0"
            http_state.count_ignored(KV_HINTS, error, ignored_actions)
        fields.append({"over": True} if has_release else {})
    return fields or [{}]


def write_tenant(obj: Any, request: Any) -> None:
    """Write the tenant into a request or batch. Raises ``CanopyError`` if it is wrong, or required
    and missing. Idempotent."""
    headers = headers_of(request)
    set_tenant(obj, headers, body_of(request), http_state.tenant_carriers)
    warning = http_state.require_tenant.check(obj, headers, lambda: _is_from_sglang(request))
    if warning is not None:
        logger.warning("canopy: %s", warning)


def stamp_request(obj: Any, inferred: dict[str, Any], request: Any = None) -> None:
    """Validate and stamp the sampling parameters of a request or batch. ``request``: its HTTP request,
    if any. Requests stamped by their route are left unchanged. Hints that the headers do not authorise
    are dropped. The parameters are copied, because the caller may reuse them."""
    if hasattr(obj, "canopy"):
        return
    obj.canopy = inferred
    params = obj.sampling_params = _copy_params(obj.sampling_params)
    write_tenant(obj, request)
    body, headers = body_of(request), index_headers(headers_of(request))
    metadata = read_metadata(body) if http_state.tenant_carriers == sent.IN_METADATA else {}
    metadata |= read_dropped_params(request_path(request), body)
    release_fields = _read_releases(obj)
    if len(release_fields) > 1 and isinstance(params, dict):  # each prompt has its own hints
        params = obj.sampling_params = [dict(params) for _ in release_fields]
    if isinstance(params, list):
        for number, prompt_params in enumerate(params):
            if isinstance(prompt_params, dict):
                prompt_release = release_fields[min(number, len(release_fields) - 1)]
                _write_stamp(prompt_params, metadata, inferred, {}, headers, prompt_release)
    elif isinstance(params, dict):
        object_fields = {name: getattr(obj, name, None) for name in ("session_id", "rid")}
        # Calls that do not come from an HTTP route have no body.
        conversation_fields = find_conversation({**object_fields, **body}, headers or {})
        _write_stamp(params, metadata, inferred, conversation_fields, headers, release_fields[0])


def _is_from_sglang(request: Any) -> bool:
    """Return whether a health check sent the request, or the server is not ready yet: SGLang's warm-up is a
    request over HTTP."""
    if request_path(request).endswith(_HEALTH_PATHS):
        return True
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    state = get_global_state()
    return state is not None and state.tokenizer_manager.server_status is ServerStatus.Starting


_HEALTH_PATHS = ("/health", "/health_generate")


def _copy_params(params: Any) -> Any:
    if isinstance(params, list):
        return [dict(each) if isinstance(each, dict) else each for each in params]
    return dict(params) if isinstance(params, dict) else {} if params is None else params


def _write_stamp(
    params: dict[str, Any],
    metadata: Mapping[str, Any],
    inferred: Mapping[str, Any],
    conversation_fields: Mapping[str, Any],
    headers: Mapping[str, str] | None,
    release_fields: Mapping[str, Any],
) -> None:
    """Read the ``custom_params`` of ``params``, and add the stamp. ``metadata``: Canopy's keys from
    other parts of the body; ``custom_params`` overrides them. ``conversation_fields``: conversation
    from other fields, used if Canopy's fields lack it. ``release_fields``: from ``kv_hints``, used
    likewise. Requests without an HTTP request have no ``headers``."""
    custom_params = params.get("custom_params")
    all_params = {**metadata, **(custom_params if isinstance(custom_params, Mapping) else {})}
    fields, errors = client_fields(all_params)
    for key, error in errors.items():
        http_state.count_ignored(key, error)
    if "conversation" not in fields:
        fields = {**conversation_fields, **fields}
    fields = http_state.hint_rule.authorise({**release_fields, **fields}, headers)
    stamp = make_stamp(inferred, fields, time.monotonic(), http_state.hint_rule.source(headers))
    sample_count = params.get("n")
    if isinstance(sample_count, int) and sample_count > 1:  # SGLang checks ``n`` later
        stamp["samples"] = sample_count
    if custom_params is None:
        stamp[PARAMS_ADDED] = True
    coefficients = http_state.ttft_fit.coefficients()
    if coefficients is not None:
        stamp["alpha"], stamp["beta"] = coefficients
    # SGLang may refuse to pass on a wrong value: too large a number, or nested objects.
    valid_params = {key: value for key, value in all_params.items() if key not in errors}
    params["custom_params"] = {**valid_params, STAMP_KEY: stamp}


def record_first_token(result: Any, state: Any, recv_obj: Any, i: int) -> None:
    """Hook after ``TokenizerManager._get_scheduler_first_token_time``, once per request. Adds the
    prefill time in the scheduler, without queueing, to the TTFT fit, and the client's wait, with
    queueing, to the last hour's times. ``result``: time of the token, if it is in the past."""
    created_at_s = state.time_stats.created_time
    if created_at_s > 0.0:
        http_state.ttft_hour.add((result or time.perf_counter()) - created_at_s)
    if recv_obj.time_stats is None:
        return
    times = recv_obj.time_stats[i]
    prefill_s = times.prefill_finished_time - times.forward_entry_time
    if times.forward_entry_time > 0.0 and prefill_s > 0.0:
        http_state.ttft_fit.add(recv_obj.prompt_tokens[i] - recv_obj.cached_tokens[i], prefill_s)


def tool_parser_field(parser: str | None, tools: Any, choice: Any) -> dict[str, str]:
    """Return the stamp's field for a chat or a response that may call tools. ``parser``: the server's
    ``--tool-call-parser``."""
    if not tools or choice == "none":
        return {}
    if choice not in (None, "auto"):
        return {"tool_parser": FORCED_CALL}
    return {"tool_parser": parser} if parser else {}
