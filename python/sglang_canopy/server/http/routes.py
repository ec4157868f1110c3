"""All of Canopy's routes, their access log, and the messages that they send to the schedulers."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from sglang_canopy import __version__, releases
from sglang_canopy.config.auto import AUTO_POLICY
from sglang_canopy.config.setups import HTTP_APPS
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.request import access, client_hints
from sglang_canopy.request.sent import tenant_fields
from sglang_canopy.server.http import early_checks, entry
from sglang_canopy.server.http.explaining import ExplainRoute
from sglang_canopy.telemetry.static_files import FILES, HEADERS, read_file
from sglang_canopy.tenant import new_shown_key
from sglang_canopy.whatif.meter import LRU
from sglang_canopy.whatif.total import combine_meters, describe_total, next_step
from sglang_canopy.wire import status_file
from sglang_canopy.wire.hints import SEND_INTERVAL_S, TooManyHints, WaitingHints, deliver
from sglang_canopy.wire.messages import EXPLAIN, HINTS, MessageKind, send

logger = logging.getLogger(__name__)

MAX_HINT_BYTES = 4096
APP_VARIABLE = "SGLANG_HTTP_SERVER_APP_PATH"
"""SGLang's variable with the HTTP application of several tokenizer workers."""
_PATH_INDEX = 2
"""Index of the path and query in the arguments of uvicorn's access records."""

waiting_hints = WaitingHints()
"""Hints of ``POST /canopy/hint`` waiting for transmission to the schedulers."""

_delivery_task: asyncio.Task[None] | None = None

_status_folder: Any = None
"""Folder with the schedulers' status files, deleted when this process ends."""


def add_routes(server_args: Any, *_: Any, **__: Any) -> None:
    """Hook before ``launch_server``: add Canopy's routes."""
    global _status_folder
    _status_folder = status_file.make_folder()
    new_shown_key()
    use_our_application(server_args)
    _add_all_routes(server_args)


def use_our_application(server_args: Any) -> None:
    """Let several tokenizer workers import ``http_worker``, unless the operator has set an application."""
    workers = getattr(server_args, "tokenizer_worker_num", None) or 1
    sglangs_app, canopys_app = HTTP_APPS
    if workers > 1 and os.environ.get(APP_VARIABLE) in (None, "", sglangs_app):
        os.environ[APP_VARIABLE] = canopys_app


def add_worker_routes(server_args: Any) -> None:
    """Add the routes in a tokenizer worker, which inherits the status folder and the key of shown
    tenants. SGLang checks no keys in its workers. Its check of the administrator's key is added here,
    because Canopy's routes would otherwise be open to all."""
    from sglang.srt.entrypoints.http_server import app

    if server_args.admin_api_key:
        from sglang.srt.utils.auth import add_api_key_middleware

        add_api_key_middleware(app, api_key=None, admin_api_key=server_args.admin_api_key)
    _add_all_routes(server_args)


def _add_all_routes(server_args: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    _hide_queries()
    early_checks.add_middleware(app)
    http_state = entry.set_options(server_args)
    is_from_gateway = http_state.hint_rule.is_from_gateway
    access.add_change_route(app, "POST", "/canopy/hint", _queue_hint, is_from_gateway)
    for path, name in {"ui": FILES[0], **{name: name for name in FILES[1:]}}.items():
        handler = partial(_serve_file, name)
        access.add_read_route(app, "GET", f"/canopy/{path}", handler, server_args.admin_api_key)
    explain = ExplainRoute(partial(_send, EXPLAIN), server_args.admin_api_key)
    access.add_read_route(app, "GET", "/canopy/explain", explain, server_args.admin_api_key)
    status = partial(_report_status, server_args, http_state, time.monotonic())
    access.add_read_route(app, "GET", "/canopy/status", status, server_args.admin_api_key)


async def _report_status(
    server_args: Any, http_state: entry.HttpState, started_at: float, _request: Any
) -> dict[str, Any]:
    """``GET /canopy/status``. ``started_at``: on the monotonic clock."""
    ranks = status_file.read_all()
    observed_ranks = status_file.read_all(status_file.OBSERVED)
    meters = [rank["whatif"] for rank in (*ranks, *observed_ranks) if rank.get("whatif")]
    whatif = combine_meters(meters)
    policy = ranks[0]["running"] if ranks else _sglangs_policy(server_args)
    auto = ranks[0].get("auto") if ranks else None
    has_floor = any(meter["floor"] for meter in meters)
    switches = None if auto is None else (AUTO_POLICY, LRU) if has_floor else ()
    return {
        "version": __version__,
        "off": releases.SWITCHED_OFF | (ranks[0].get("off", {}) if ranks else {}),
        "next_step": next_step(
            whatif, policy, is_canopy=policy in live_names(), auto_policies=switches
        ),
        "policy": policy,
        "policy_config": ranks[0]["running_config"] if ranks else {},
        "ttft_model": http_state.ttft_fit.stats(),
        "ttft_hour": http_state.ttft_hour.points(),
        "client_hints": http_state.hint_rule.mode,
        "hints_waiting": len(waiting_hints),
        "ignored_fields": dict(http_state.ignored_fields),
        "refused_requests": _refusals([*ranks, *observed_ranks]),
        "uptime_s": time.monotonic() - started_at,
        "process": os.getpid(),
        "auto": auto,
        "auto_parts": ranks[0].get("auto_parts") if ranks else None,
        "whatif": whatif,
        "whatif_in_words": None if whatif is None else describe_total(whatif),
        **{kind: next(iter(status_file.read_all(kind)), None) for kind in status_file.ADDED_KINDS},
        "ranks": ranks,
    }


class QueryFilter(logging.Filter):
    """Remove the queries of Canopy's routes, which contain tenants, from uvicorn's access log."""

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = record.args
        if isinstance(arguments, tuple) and len(arguments) > _PATH_INDEX:
            path, _, query = str(arguments[_PATH_INDEX]).partition("?")
            if query and "/canopy/" in path:
                record.args = (*arguments[:_PATH_INDEX], path, *arguments[_PATH_INDEX + 1 :])
        return True


def _hide_queries() -> None:
    """Install the filter in this process. Uvicorn's logging set-up keeps it."""
    access_log = logging.getLogger("uvicorn.access")
    if not any(isinstance(log_filter, QueryFilter) for log_filter in access_log.filters):
        access_log.addFilter(QueryFilter())


async def _serve_file(name: str, _request: Any) -> Any:
    """``GET /canopy/ui`` and the page's files, protected by the same key as its data."""
    from starlette.responses import Response

    content, media_type = read_file(name)
    return Response(content, media_type=media_type, headers=HEADERS)


def _refusals(ranks: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return requests that ended without having been admitted, by reason, over all ``ranks``."""
    total: Counter[str] = Counter()
    for rank in ranks:
        total.update(rank.get("refused_requests", {}))
    return dict(total)


def _sglangs_policy(server_args: Any) -> str | None:
    """Return SGLang's policy; ``None`` if its prefix cache is off, or before Canopy's ranks report."""
    policy: str = server_args.radix_eviction_policy
    is_off = getattr(server_args, "disable_radix_cache", False)
    return None if is_off or policy in (AUTO, *live_names()) else policy


async def _send(kind: MessageKind, text: str) -> list[Any]:
    """Send one message to every scheduler. Returns one answer per replica."""
    from sglang.srt.entrypoints import http_server

    manager = http_server._global_state.tokenizer_manager
    manager.auto_create_handle_loop()
    return await send(manager, kind, text)


async def _queue_hint(request: Any) -> dict[str, Any]:
    """``POST /canopy/hint``: queue one hint and start its delivery."""
    rule = entry.http_state.hint_rule
    if not rule.accepts(request.headers):
        raise access.Refused(
            403,
            f"this server runs with {client_hints.CLIENT_HINTS_FLAG} {rule.mode}: hints are "
            + ("not accepted" if rule.mode == client_hints.OFF else _ACCEPTED_FROM),
        )
    body = await access.read_json(request, MAX_HINT_BYTES, "a hint")
    if isinstance(body, dict):
        body |= tenant_fields(request, body)
    try:
        waiting_hints.add(body, time.monotonic(), rule.source(request.headers))
    except TooManyHints as error:
        raise access.Refused(429, str(error), retry_after_s=1) from None
    _start_delivery()
    return {"waiting": len(waiting_hints)}


_ACCEPTED_FROM = (
    "accepted with the administrator's key, or from a gateway that sends its secret as "
    + client_hints.GATEWAY_HEADER
)


def _start_delivery() -> None:
    """Send waiting hints now, or with a running delivery. Call it in the event loop."""
    global _delivery_task
    if _delivery_task is None or _delivery_task.done():
        _delivery_task = asyncio.get_running_loop().create_task(_deliver())


async def _deliver() -> None:
    try:
        await deliver(waiting_hints, partial(_send, HINTS), lambda: asyncio.sleep(SEND_INTERVAL_S))
    except Exception:
        logger.exception("canopy: hints could not be sent; they are sent with the next one")
