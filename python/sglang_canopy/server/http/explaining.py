"""``GET /canopy/explain``: query the schedulers from the HTTP process."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.counters import TIERS
from sglang_canopy.request import access
from sglang_canopy.request.sent import tenant_fields
from sglang_canopy.tenant import tenant_of
from sglang_canopy.wire import status_file
from sglang_canopy.wire.hints import TenantRate
from sglang_canopy.wire.stamp import CLIENT_FIELDS

ANSWER_INTERVAL_S = 0.5
"""Minimum seconds between answers to users, because each reads the eviction order."""

SendMessage = Callable[[str], Awaitable[list[Any]]]


class ExplainRoute:
    """Handler of the route. ``send`` sends one message to every scheduler."""

    def __init__(self, send: SendMessage, admin_api_key: str | None) -> None:
        self._send = send
        self._admin_api_key = admin_api_key
        self._user_rate = TenantRate(1.0 / ANSWER_INTERVAL_S, burst=1)

    async def __call__(self, request: Any) -> dict[str, Any]:
        """Explain a conversation of the request's tenant; for an administrator without a tenant, of any
        tenant. Raises ``Refused`` or ``CanopyError``."""
        tenant = tenant_fields(request)
        body: dict[str, Any] = {"conversation": _read_conversation(request)}
        is_admin = access.has_admin_key(request.headers, self._admin_api_key)
        if not is_admin or any(tenant.values()):
            body["tenant"] = tenant_of(tenant["extra_key"], tenant["cache_salt"])
        if not is_admin and not self._user_rate.take(None, time.monotonic()):
            raise access.Refused(
                429, f"one answer every {ANSWER_INTERVAL_S:g} s; try again then", retry_after_s=1
            )
        if not status_file.read_all():
            raise access.Refused(
                409, "this server runs one of SGLang's own policies, which cannot be explained"
            )
        body["answer"] = answer = secrets.token_hex(8)
        await self._send(json.dumps(body))
        return {"tiers": list(TIERS), "replicas": status_file.take_answers(answer)}


def _read_conversation(request: Any) -> str:
    name = request.query_params.get("conversation")
    try:
        conversation: str = CLIENT_FIELDS["canopy_conversation"][1](name)
    except ValueError as error:
        raise CanopyError(f"give ?conversation=ID: {error}") from None
    return conversation
