"""``/canopy/plan``: what of a plan a running server has in force, and a change of it."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields
from typing import Any

from sglang_canopy.config.live_plan import CHANGEABLE, MAX_BYTES, live_name, message, part_of
from sglang_canopy.config.plan_file import ServerPlan
from sglang_canopy.config.policy_change import MADE_AT_START
from sglang_canopy.config.server_settings import ServerSettings
from sglang_canopy.request import access
from sglang_canopy.server.flags import BACKEND, DYNAMIC_BACKEND, given_extra
from sglang_canopy.telemetry import status_file

Send = Callable[[str], Awaitable[list[Any]]]
MAX_ANSWER_BYTES = 4 << 20
"""More than two tables of TTLs, however large, and all else."""


class Plans:
    """The route's handlers. ``send`` sends one message to every scheduler."""

    def __init__(self, send: Send, server_args: Any) -> None:
        self._send = send
        self._server_args = server_args

    async def get(self, _request: Any) -> dict[str, Any]:
        """``GET``: what can change (``now``, of the first replica), and what cannot (``fixed``)."""
        answers = await self._ask(None)
        return {
            "now": answers[0],
            "changeable": list(CHANGEABLE),
            "fixed": fixed(self._server_args),
            "replicas": len(answers),
            "alike": all(answer == answers[0] for answer in answers),
        }

    async def post(self, request: Any) -> dict[str, Any]:
        """``POST``: change what the body says, on every rank at the same request. What was in force
        before is ``before``: sent back as it is, it undoes the change."""
        plan = part_of(await access.read_json(request, MAX_BYTES, "a plan"))
        answers = await self._ask(plan)
        return {"before": answers[0], "replicas": len(answers)}

    async def _ask(self, plan: ServerPlan | None) -> list[Mapping[str, Any]]:
        if not status_file.read_all():
            raise access.Refused(
                409,
                "this server runs a policy of SGLang's own, and nothing of a plan can change; "
                "start it with --radix-eviction canopy-lru, which is SGLang's order on Canopy's tree",
            )
        name = secrets.token_hex(8)
        sent = await self._send(message(name, plan))
        answers = status_file.take(name, MAX_ANSWER_BYTES)
        refused = [answer["error"] for answer in answers if "error" in answer]
        if refused:
            raise access.Refused(409, str(refused[0]))
        if not answers or not all(answer.updated for answer in sent):
            raise access.Refused(500, "a scheduler could not answer; see its log")
        return answers


def fixed(server_args: Any) -> dict[str, Any]:
    """The keys of a plan file that need a new start, as this server was started. ``host_bytes`` is
    absent where the host pool follows the device's size."""
    extra = _extra(server_args)
    found: dict[str, Any] = {"server": settings_of(server_args, extra)}
    if server_args.enable_hierarchical_cache and server_args.hicache_size:
        found["host_bytes"] = round(server_args.hicache_size * 1e9)
    if found["server"].get("hicache_storage_backend") == BACKEND:
        found["disk_eviction"] = live_name(extra.get("policy", "lru"))
        found["disk_eviction_config"] = extra.get("policy_config", {})
        if extra.get("path"):
            found["disk_path"] = extra["path"]
    given = server_args.radix_eviction_policy_config or {}
    found["radix_eviction_config"] = {k: v for k, v in given.items() if k in MADE_AT_START}
    return found


def settings_of(server_args: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's own settings that a plan names, as this server has them; unset ones are absent."""
    found = {
        f.name: extra.get(f.name, getattr(server_args, f.name, None))
        for f in fields(ServerSettings)
    }
    if found["hicache_storage_backend"] == "dynamic" and DYNAMIC_BACKEND.items() <= extra.items():
        found["hicache_storage_backend"] = BACKEND
    return {name: value for name, value in found.items() if value is not None}


def _extra(server_args: Any) -> dict[str, Any]:
    text = server_args.hicache_storage_backend_extra_config
    return given_extra(text) if isinstance(text, str) else {}
