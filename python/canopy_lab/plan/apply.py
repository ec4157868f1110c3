"""A plan applied to servers that run: what would change, what needs a new start, and the way back.

A record of what was in force is on disk before anything changes, so that every change can be
undone, also after this program was killed.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_canopy.config.live_plan import POLICIES, live_name, part_of
from sglang_canopy.config.plan_file import ServerPlan
from sglang_canopy.config.policy_change import MADE_AT_START
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import replace_file
from sglang_canopy.ttl.table import TTLTable

FORMAT = "canopy-applied"
MAX_SERVERS = 256
TIMEOUT_S = 60.0
_MAX_ANSWER_BYTES = 8 << 20
_MAX_RECORD_BYTES = 256 << 20
_SIZE_TOLERANCE = 0.01
"""SGLang rounds pools to whole pages."""


@dataclass(frozen=True, slots=True)
class Server:
    """One server, by its address and the administrator's key."""

    url: str
    api_key: str | None = None

    def ask(self, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """``/canopy/plan``: what is in force, or with ``body`` a change. Raises ``CanopyError``."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/canopy/plan", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                found: dict[str, Any] = json.loads(answer.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                why = "no /canopy/plan here; is this a gateway, or a server without Canopy?"
            else:
                why = _message(error)
            raise CanopyError(f"{self.url} answers {error.code}: {why}") from None
        except (OSError, ValueError) as error:
            raise CanopyError(f"no answer from {self.url} ({error}); give --url") from None
        return found


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read(1 << 16))["error"]["message"])[:500]
    except (ValueError, KeyError, TypeError, OSError):
        return str(error.reason)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a plan to a server that runs."""

    change: Mapping[str, Any] = field(default_factory=dict)
    """What to send: keys of a plan file."""
    lines: tuple[str, ...] = ()
    """The same in words."""
    restart: tuple[str, ...] = ()
    """What a new start alone can change."""


def difference(plan: ServerPlan, answer: Mapping[str, Any]) -> Difference:
    """What of ``plan`` is not in force on a server whose ``/canopy/plan`` says ``answer``.

    Raises ``CanopyError`` for a plan or an answer that is none.
    """
    try:
        now, fixed = dict(answer["now"]), dict(answer["fixed"])
    except (KeyError, TypeError, ValueError) as error:
        raise CanopyError(f"the server's /canopy/plan is not understood ({error!r:.80})") from None
    change: dict[str, Any] = {}
    restart: list[str] = []
    device = {k: v for k, v in plan.radix_eviction_config.items() if k not in MADE_AT_START}
    for key, value in plan.radix_eviction_config.items():
        have = fixed.get("radix_eviction_config", {}).get(key)
        if key not in device and have != value:
            restart.append(_words(f"radix_eviction_config {key}", have, value))
    policies = _policies(plan, device, now)
    if policies is not None and policies != {k: now[k] for k in POLICIES if k in now}:
        change |= policies
    for key in ("ttl", "host_ttl", "disk_bytes"):
        wanted = getattr(plan, key)
        if wanted is None:
            continue
        if key not in now:
            restart.append(_words(key, "no such tier of Canopy's", "one"))
        elif (TTLTable.from_json(now[key]) if key != "disk_bytes" else now[key]) != wanted:
            change[key] = wanted if key == "disk_bytes" else wanted.to_json()
    if change:
        part_of(change)  # a mistake is found here, not on one server of several
    restart += _fixed(plan, fixed)
    lines = tuple(_words(key, now.get(key), change[key]) for key in change)
    return Difference(change, lines, tuple(restart))


def _policies(
    plan: ServerPlan, device: Mapping[str, Any], now: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The keys of both tiers' policies as the plan wants them, where it says anything of them."""
    if plan.radix_eviction is None and plan.host_eviction is None:
        return None
    found = {k: now[k] for k in POLICIES if k in now}
    if plan.radix_eviction is not None:
        found.pop("radix_eviction_config", None)
        found["radix_eviction"] = live_name(plan.radix_eviction)
        if device:
            found["radix_eviction_config"] = dict(device)
    if plan.host_eviction is not None:
        found.pop("host_eviction_config", None)
        found["host_eviction"] = live_name(plan.host_eviction)
        if plan.host_eviction_config:
            found["host_eviction_config"] = dict(plan.host_eviction_config)
        same = found["host_eviction"] == found.get("radix_eviction")
        if same and "host_eviction" not in now and found.get("host_eviction_config", {}) == device:
            # The server's host has the device's policy anyway, with what it learns.
            found.pop("host_eviction")
            found.pop("host_eviction_config", None)
    return found


def _fixed(plan: ServerPlan, fixed: Mapping[str, Any]) -> list[str]:
    found = []
    have = fixed.get("host_bytes")
    if plan.host_bytes is not None and (
        have is None or abs(have - plan.host_bytes) > _SIZE_TOLERANCE * plan.host_bytes
    ):
        found.append(_words("host_bytes", have, plan.host_bytes))
    if plan.disk_eviction is not None:
        wanted = (live_name(plan.disk_eviction), dict(plan.disk_eviction_config))
        runs = (fixed.get("disk_eviction"), dict(fixed.get("disk_eviction_config") or {}))
        if wanted != runs:
            found.append(_words("disk_eviction", *(" ".join(map(str, w)) for w in (runs, wanted))))
    if plan.disk_path is not None and fixed.get("disk_path") != plan.disk_path:
        found.append(_words("disk_path", fixed.get("disk_path"), plan.disk_path))
    runs_with = fixed.get("server") or {}
    for name, value in (plan.server.to_json() if plan.server else {}).items():
        have = runs_with.get(name)
        if have != value and not (value is False and have is None):
            found.append(_words(f"server {name}", have, value))
    return found


def _words(key: str, before: Any, after: Any) -> str:
    return f"{key}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    if isinstance(value, Mapping) and "residual_ttl_s" in value:
        parts = [f"{len(value[k])} {k}" for k in ("groups", "categories") if value.get(k)]
        rest = value["residual_ttl_s"]
        return " and ".join([*parts, "no expiry" if rest is None else f"{rest:g} s for the rest"])
    if value is None:
        return "not set"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(slots=True)
class Record:
    """What was applied where, and what was in force before."""

    path: Path
    plan: str
    """The plan file."""
    time: float
    """Seconds since 1970."""
    servers: list[dict[str, Any]] = field(default_factory=list)
    """``url``, ``before`` and ``change`` of each, in the order in which they were changed."""
    undone: str | None = None
    """Why, and when; ``None`` as long as it is in force."""

    def save(self) -> None:
        """Raises ``CanopyError``."""
        document = {
            "format": FORMAT,
            "version": 1,
            "plan": self.plan,
            "time": self.time,
            "servers": self.servers,
            "undone": self.undone,
        }
        try:
            replace_file(self.path, json.dumps(document, indent=1) + "\n", durable=True)
        except OSError as error:
            raise CanopyError(f"cannot write the record {str(self.path)!r}: {error}") from None

    @classmethod
    def read(cls, path: Path) -> Record:
        """Raises ``CanopyError`` for a file that is none."""
        try:
            if path.stat().st_size > _MAX_RECORD_BYTES:
                raise ValueError("too large")
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT or document["version"] != 1:
                raise ValueError(document["format"])
            servers = [{k: s[k] for k in ("url", "before", "change")} for s in document["servers"]]
            for server in servers:
                part_of(server["before"])
            made = cls(path, str(document["plan"]), float(document["time"]), servers)
            made.undone = document.get("undone")
            return made
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CanopyError(
                f"{str(path)!r} is no record of canopy apply ({error!r:.120})"
            ) from None


def apply(
    record: Record,
    changes: Sequence[tuple[Server, Difference, Mapping[str, Any]]],
    now: Callable[[], float] = time.time,
) -> None:
    """Change each server (with what is in force there), on all or on none.

    Raises ``CanopyError`` after having undone what was changed before the one that refused.
    """
    record.time = now()
    done: list[Server] = []
    for server, found, before in changes:
        record.servers.append({"url": server.url, "before": dict(before), "change": dict(found.change)})  # fmt: skip
        record.save()  # before the change: it can be undone whatever happens
        try:
            server.ask(found.change)
        except CanopyError as error:
            trouble = undo(
                record, {s.url: s.api_key for s, *_ in changes}, f"refused: {error}", now
            )
            raise CanopyError(
                f"{error}; nothing is changed" + (f", except: {trouble}" if trouble else "")
            ) from None
        done.append(server)


def undo(
    record: Record,
    keys: Mapping[str, str | None],
    why: str,
    now: Callable[[], float] = time.time,
) -> str | None:
    """Send every server what was in force before, the last one changed first, and note ``why``.

    ``keys``: the administrator's key by address. Returns what could not be undone, in words; the
    record stays in force then, so that it can be tried again.
    """
    troubles = []
    for entry in reversed(record.servers):
        try:
            Server(entry["url"], keys.get(entry["url"])).ask(entry["before"])
        except CanopyError as error:
            troubles.append(str(error))
    if not troubles:
        record.undone = f"{why} ({time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(now()))})"
        record.save()
    return "; ".join(troubles) or None
