"""Lifetimes and values that clients of other systems send, as records of ``retention``.

Each source is read only where ``--canopy-retention-sources`` names it: what they ask for is at the
cost of others, if within the tenant's budget.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.request.fields import MAX_KEEP_S, MAX_PIN_S
from sglang_canopy.request.retention import (
    ANSWER,
    DEVICE,
    DISK,
    MAX_RANGES,
    MOST,
    ORDINARY,
    Retention,
    made,
)

FLAG = "--canopy-retention-sources"
ATTRIBUTE = "_canopy_retention_sources"
ALL, NONE = "all", "none"
CACHE_CONTROL = "cache_control"

PRIORITY_S = 60.0
"""How long a priority counts that says no duration."""
BREAKPOINT = 50
"""The priority of a breakpoint of ``cache_control``, which has none of its own."""
_DAY = "24h"
_TTL_S = {"5m": 300.0, "1h": 3600.0}

Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Source:
    """One place where a wish may stand."""

    name: str
    """As in ``--canopy-retention-sources``."""
    where: str
    meaning: str
    read: Callable[[Body], Iterator[Retention]]


def breakpoint_s(control: Any) -> float | None:
    """Seconds that a ``cache_control`` asks for; ``None`` where it is none."""
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        return None
    return _TTL_S["1h"] if control.get("ttl") == "1h" else _TTL_S["5m"]


def at_breakpoint(seconds: float, end: int | None) -> Retention:
    """A breakpoint after the first ``end`` tokens of the prompt."""
    return Retention((DEVICE, DISK), BREAKPOINT, seconds, 0, end)


def _cache_control(body: Body) -> Iterator[Retention]:
    """One for the whole request; those within it are ``breakpoints.find``'s."""
    seconds = breakpoint_s(body.get("cache_control"))
    if seconds is not None:
        yield at_breakpoint(seconds, None)


def _prompt_cache_retention(body: Body) -> Iterator[Retention]:
    if body.get("prompt_cache_retention") == _DAY:
        yield Retention((DISK,), BREAKPOINT, MAX_PIN_S)


def _by_priority(priority: Any) -> Iterator[Retention]:
    """SGLang's scale: 0 is ordinary, more is worth more, without bounds."""
    if isinstance(priority, int) and not isinstance(priority, bool) and priority != 0:
        scaled = min(max(ORDINARY + priority, 0), MOST)
        yield Retention((DEVICE,), scaled, PRIORITY_S)


def _priority(body: Body) -> Iterator[Retention]:
    return _by_priority(body.get("priority"))


def _agent_hints(body: Body) -> Iterator[Retention]:
    yield from _by_priority(_inner(_inner(body.get("nvext")).get("agent_hints")).get("priority"))


def _kv_hints(body: Body) -> Iterator[Retention]:
    """``kv.retain`` 1.x, with the payload that vLLM defines; actions that are not known are for
    others."""
    for action in _objects(_inner(body.get("kv_hints")).get("actions")):
        if action.get("action_type") != "kv.retain":
            continue
        if not str(action.get("action_version")).startswith("1."):
            continue
        for one in _objects(_inner(action.get("payload")).get("directives")):
            priority, seconds = one.get("priority"), one.get("duration", MAX_KEEP_S)
            if isinstance(priority, int) and priority > 0:
                priority = max(priority, ORDINARY + 1)  # there all but 0 protect
            start = ANSWER if one.get("covers_output") is True else one.get("start", 0)
            yield from _if_made(
                priority, MAX_KEEP_S if seconds is None else seconds, start, one.get("end")
            )


def _token_ranges(body: Body) -> Iterator[Retention]:
    config = _inner(body.get("kv_cache_retention_config"))
    for one in _objects(config.get("token_range_retention_configs")):
        yield from _if_made(
            one.get("priority"),
            _of_ms(one.get("duration_ms")),
            one.get("token_start", 0),
            one.get("token_end"),
        )
    if "decode_retention_priority" in config:
        seconds = _of_ms(config.get("decode_duration_ms"))
        yield from _if_made(config["decode_retention_priority"], seconds, ANSWER, None)


def _if_made(priority: Any, seconds: Any, start: Any, end: Any) -> Iterator[Retention]:
    found = made((DEVICE,), priority, seconds, start, end)
    if found is not None and found.priority != ORDINARY:
        yield found


def _of_ms(milliseconds: Any) -> Any:
    if milliseconds is None:
        return MAX_KEEP_S
    ok = isinstance(milliseconds, (int, float)) and abs(milliseconds) < 1e15
    return milliseconds / 1000.0 if ok else None


def _inner(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _objects(value: Any) -> Iterator[Mapping[str, Any]]:
    yield from (one for one in (value if isinstance(value, list) else []) if isinstance(one, dict))


SOURCES = (
    Source(
        CACHE_CONTROL,
        "`cache_control` of the request, of tools, of `system` and of content parts "
        "(`/v1/messages`, `/v1/chat/completions`)",
        "the prompt up to the breakpoint: kept on the device and pinned on disk for `ttl`, `5m` "
        "unless it says `1h`",
        _cache_control,
    ),
    Source(
        "prompt_cache_retention",
        "`prompt_cache_retention` (OpenAI)",
        "`24h`: the path is pinned on disk for a day. Anything else: nothing",
        _prompt_cache_retention,
    ),
    Source(
        "priority",
        "`priority` (SGLang)",
        f"above 0: the path is kept on the device for {PRIORITY_S:g} s; below 0: it goes first",
        _priority,
    ),
    Source(
        "agent_hints",
        "`nvext.agent_hints.priority` (Dynamo)",
        "the same. `osl`, `strict_priority` and `speculative_prefill` are not read",
        _agent_hints,
    ),
    Source(
        "kv_hints",
        "`kv_hints`, actions `kv.retain` of version 1.x (SGLang's envelope, vLLM's payload)",
        "priority 1 to 100: the tokens up to `end` are kept on the device for `duration`; 0: they "
        "go first. Other actions (`kv.demote`, `kv.prefetch`, `kv.deref`, `kv.fetch`) are not read",
        _kv_hints,
    ),
    Source(
        "kv_cache_retention_config",
        "`kv_cache_retention_config` (TensorRT-LLM's `KvCacheRetentionConfig` as JSON)",
        "priority 36 to 100: the tokens up to `token_end` are kept on the device for "
        "`duration_ms`; 0 to 34: they go first; the answer likewise by `decode_retention_priority`",
        _token_ranges,
    ),
)


def sources_of(text: str) -> tuple[str, ...]:
    """The names that a flag's value stands for. Raises ``CanopyError`` for an unknown one."""
    known = [s.name for s in SOURCES]
    words = [word for word in re.split(r"\s*,\s*", text.strip()) if word]
    for word in words:
        if word not in known and word not in (ALL, NONE):
            raise CanopyError(
                f"has an unknown source {word[:60]!r}; give {ALL} or {NONE}, or some of: "
                f"{', '.join(known)}"
            )
    return tuple(name for name in known if name in words or ALL in words)


def asked(sources: tuple[str, ...], body: Body) -> list[Retention]:
    """What a body asks for in the fields that count; malformed ones are as absent."""
    found: list[Retention] = []
    for source in SOURCES:
        if source.name in sources:
            for one in source.read(body):
                if len(found) == MAX_RANGES:
                    return found
                found.append(one)
    return found


def rule_of(server_args: Any) -> tuple[str, ...]:
    """The sources that a server's arguments name."""
    return tuple(getattr(server_args, ATTRIBUTE, ()))
