"""Set-ups that Canopy's policies, the session gate, the queue order or the disk tier do not
support.

Another plugin may add a feature with its own table. Refusals are checked on the command line, for
an early error, and when each scheduler builds its cache, which no way of starting SGLang bypasses
(``sglang.Engine`` reads no command line).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

POLICIES, GATE, QUEUE, DISK = "policies", "gate", "queue", "disk"
"""Features that may be refused: Canopy's eviction policies, the session gate, the queue order, and the
disk tier. All need one of the policies, and are refused with them."""

_WITHOUT = {
    POLICIES: "use --radix-eviction lru",
    GATE: "leave out --canopy-session-gate",
    QUEUE: "leave out --canopy-queue-order",
    DISK: "leave out --hicache-storage-backend",
}
_BYPASSES = "takes requests that bypass Canopy's stamps"
_NO_TICK = "takes requests without sending the time to the session gate"
HTTP_APPS = ("sglang.srt.entrypoints.http_server:app", "sglang_canopy.server.start.http_worker:app")
"""SGLang's own HTTP application, and the application that Canopy's workers import."""
LMCACHE = "--enable-lmcache brings its own cache"
STREAMING_SESSION = "--enable-streaming-session keeps KV outside the tree"
DISAGGREGATED = "--disaggregation-mode {} is not verified"
_TRUE = ("1", "true", "yes", "y")
"""Values of a variable that SGLang reads as true."""


DROP = "drop that option"
ONE = "use 1"


@dataclass(frozen=True, slots=True)
class Condition:
    """An SGLang option, and the values of it that a feature does not support."""

    option: str | None
    """Field of ``ServerArgs``, or of SGLang's ``TreeCacheBuildContext``."""
    refused: Callable[[Any], bool] = bool
    """Returns whether this value of the option is refused."""
    variable: str | None = None
    """Environment variable with the same effect."""
    instead: str = DROP
    """Remedy for the error message; empty if there is no remedy."""

    def remedy(self) -> str:
        """Return the change that lifts the refusal and keeps the feature; empty if there is none."""
        if self.option is None or self.instead not in (DROP, ONE):
            return self.instead
        flag = f"--{self.option.replace('_', '-')}"
        return f"use {flag} 1" if self.instead == ONE else f"leave out {flag}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal(Condition):
    """Reasons by feature, with ``{}`` for the value; ``None`` if supported."""

    policies: str | None = None
    gate: str | None = None
    queue: str | None = None
    disk: str | None = None


@dataclass(frozen=True, slots=True)
class Addition:
    """A feature that another plugin adds to the server."""

    flag: str
    table: tuple[Condition, ...]
    """Its refusals. Each has the reason in a field with the feature's name."""
    is_requested: Callable[[Any], bool]
    """Returns whether parsed arguments enable the feature."""
    served: frozenset[str]
    """Set-ups of ``doctor.setups`` in which tests serve it."""


ADDITIONS: dict[str, Addition] = {}
"""Features that other plugins in this process have added, by name."""


def above_one(size: Any) -> bool:
    return (size or 1) > 1


def other_than(*allowed: Any) -> Callable[[Any], bool]:
    return lambda value: value is not None and value not in allowed


def whole_prefill_graph(config: Any) -> bool:
    """Return whether ``--cuda-graph-config``, as given (a dict) or as resolved by SGLang, has one
    full prefill graph."""
    of = config.get if isinstance(config, Mapping) else lambda phase: getattr(config, phase, None)
    prefill = of("prefill") or {}
    if isinstance(prefill, Mapping):
        return prefill.get("backend") == "full"
    return getattr(prefill, "backend", None) == "full"


REFUSALS = (
    *(
        Refusal(f"is_hybrid_{kind}", disk=f"pages on disk have no {what}", instead="")
        for kind, what in (("swa", "sliding windows"), ("ssm", "Mamba or linear-attention state"))
    ),
    Refusal(
        "enable_unified_memory",
        policies="--enable-unified-memory shares one pool among kinds of memory, which is not verified",
    ),
    Refusal(
        "enable_session_radix_cache",
        policies="--enable-session-radix-cache keeps nodes by session",
    ),
    Refusal("radix_cache_backend", policies="--radix-cache-backend chooses another cache"),
    Refusal(
        "speculative_algorithm",
        gate="speculative decoding is not verified",
        queue="speculative decoding is not verified",
    ),
    Refusal(
        "speculative_algorithm",
        disk="--speculative-algorithm {} keeps KV of a second model, which pages on disk do not have",
        refused=other_than("NGRAM"),
    ),
    Refusal("enable_lmcache", policies=LMCACHE),
    Refusal("enable_flexkv", policies="--enable-flexkv brings its own cache"),
    Refusal(
        "enable_unified_cache_external_linker",
        policies="the external cache linker is not verified",
    ),
    Refusal("enable_dp_attention", gate="data-parallel attention is not verified"),
    Refusal("enable_streaming_session", policies=STREAMING_SESSION),
    Refusal("use_ray", policies="--use-ray starts processes that load no plugins"),
    Refusal("grpc_mode", gate=f"--grpc-mode {_NO_TICK}"),
    Refusal("smg_grpc_mode", gate=f"--smg-grpc-mode {_NO_TICK}"),
    Refusal(
        "grpc_port",
        refused=other_than(),
        variable="SGLANG_GRPC_PORT",
        gate="--grpc-port {} is not verified",
    ),
    Refusal(
        "tokenizer_worker_num",
        refused=above_one,
        instead=ONE,
        gate="--tokenizer-worker-num {}: the workers do not share their sessions",
    ),
    Refusal(
        None,
        policies="SGLANG_HTTP_SERVER_APP_PATH={} names an HTTP application that loads no plugins",
        refused=lambda value: value not in (None, *HTTP_APPS),
        variable="SGLANG_HTTP_SERVER_APP_PATH",
        instead="unset that variable",
    ),
    Refusal(
        "pp_size",
        refused=above_one,
        instead=ONE,
        gate="--pp-size {} is not supported yet",
        queue="--pp-size {} is not verified",
    ),
    Refusal(
        "disaggregation_mode",
        policies="--disaggregation-mode decode keeps SGLang's own order: prompts are computed, and "
        "policies learn, on the prefill side; give --radix-eviction to the servers of that side",
        refused=lambda mode: mode == "decode",
        instead="",
    ),
    Refusal(
        "disaggregation_mode",
        refused=other_than("null"),
        **dict.fromkeys((GATE, QUEUE, DISK), DISAGGREGATED),
    ),
    Refusal(
        None,
        policies=f"SGLANG_RUST_SERVER {_BYPASSES}",
        refused=lambda value: str(value).lower() in _TRUE,
        variable="SGLANG_RUST_SERVER",
        instead="unset that variable",
    ),
    Refusal(
        "disable_radix_cache",
        policies="--disable-radix-cache, or SGLang for this model, turns the prefix cache off, so that "
        "there is nothing to evict",
    ),
)
"""Refusals in order of precedence: the first that applies is reported."""


def unsupported(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the reason why ``feature``, one of the above or added, cannot run; ``None`` if it can.

    ``configured``: a ``ServerArgs``, and the ``TreeCacheBuildContext`` if it exists.
    """
    return next(all_unsupported(feature, *configured, environment=environment), None)


def all_unsupported(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield every reason why ``feature`` cannot run, in order of precedence."""
    for why, refusal in applying(feature, *configured, environment=environment):
        without = _WITHOUT.get(feature) or f"leave out {ADDITIONS[feature].flag}"
        ways_out = [way for way in (refusal.instead, without) if way]
        yield f"{why}; {', or '.join(ways_out)}"


def applying(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, Condition]]:
    """Yield every refusal of ``feature`` that applies, with its reason, in order of precedence."""
    table = ADDITIONS[feature].table if feature in ADDITIONS else REFUSALS
    for refusal in table:
        why = getattr(refusal, feature)
        if why is None:
            continue
        for value in _values(refusal, configured, environment):
            if refusal.refused(value):
                yield why.format(value), refusal
                break


def _values(
    refusal: Condition, configured: tuple[Any, ...], environment: Mapping[str, str]
) -> Iterator[Any]:
    """Yield the option's values in all configured objects, else its variable's value."""
    given = [getattr(one, refusal.option, None) for one in configured] if refusal.option else []
    values = [value for value in given if value is not None]
    if not values and refusal.variable:
        values = [environment.get(refusal.variable) or None]
    yield from values or [None]
