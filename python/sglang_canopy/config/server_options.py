"""All Canopy options of a server, as one object on SGLang's ``ServerArgs``.

``server/start/arguments.py`` builds it from the command line; SGLang passes its arguments to every
process and rank. It contains no secrets, since SGLang logs its arguments and shows them to clients.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_canopy import declared
from sglang_canopy.admission.activation import GATE_AUTO, GATE_OFF, GateSettings
from sglang_canopy.config.queue import QueueFlags
from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.config.whatif import MeterOptions
from sglang_canopy.declared import declare
from sglang_canopy.request import client_hints, prompt, sent

ATTRIBUTE = "_canopy_options"
GATE_FLAG = "--canopy-session-gate"


AUTO_PARTS = ("policy", "order", "write policy", "floor", "meter")


@dataclass(frozen=True, slots=True)
class AutoPart:
    """State of one part of ``auto`` on a server."""

    name: str
    """One of ``AUTO_PARTS``."""
    active: bool
    runs: str
    """What runs now: a policy, an order, or policies."""
    why: str = ""
    """Reason for an inactive part."""
    change: str = ""
    """Change that activates the part; empty if there is none."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """Return the state in one line."""
        if self.active:
            return f"{self.name} is on ({self.runs})"
        return f"{self.name} is off: {self.why}" + (f"; {self.change}" if self.change else "")


@dataclass(frozen=True, slots=True)
class RequestOptions(declared.Checked):
    """Flags for requests: allowed fields, tenants and conversations, and session admission."""

    client_hints: str = declare(
        client_hints.ON,
        client_hints.CLIENT_HINTS_FLAG,
        "Which hints may affect eviction: those of all requests, none, or only those with the admin "
        f"key or the gateway's secret (${client_hints.SECRET_VARIABLE}) in "
        f"{client_hints.GATEWAY_HEADER}.",
        choices=client_hints.MODES,
        hidden=True,
    )
    require_tenant: str = declare(
        sent.OFF,
        sent.REQUIRE_TENANT_FLAG,
        "For requests without a tenant (cache_salt, extra_key): off warns once if others name "
        "one, warn warns once, on answers 400.",
        choices=sent.MODES,
        hidden=True,
    )
    carriers: str = declare(
        sent.NO_CARRIERS,
        sent.CARRIERS_FLAG,
        "Where else a request may name its tenant, behind gateways that drop the body's fields: "
        f"metadata ({sent.TENANT_METADATA['cache_salt']}, {sent.TENANT_METADATA['extra_key']}, and our other "
        "keys), which your outermost gateway must overwrite.",
        choices=sent.CARRIERS,
        hidden=True,
    )
    strip_billing_line: str = declare(
        "on",
        prompt.BILLING_FLAG,
        "Leave out Claude Code's billing line, new in each request, at the start of the system text of "
        "/v1/messages: no prefix could be reused behind it.",
        choices=("on", "off"),
        hidden=True,
    )
    session_gate: str = declare(
        GATE_OFF,
        GATE_FLAG,
        "While agents evict each other's KV, let their sessions start and continue only as fast "
        "as their KV fits (auto).",
        choices=(GATE_OFF, GATE_AUTO),
        hidden=True,
    )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options that this server was started with."""

    requests: RequestOptions = field(default_factory=RequestOptions)
    queue: QueueFlags = field(default_factory=QueueFlags)
    tiers: TierOptions = field(default_factory=TierOptions)
    meter: MeterOptions | None = None
    """``None`` without a what-if meter."""
    auto: tuple[AutoPart, ...] | None = None
    """``--radix-eviction auto`` only: state of its parts."""

    @property
    def gate(self) -> GateSettings | None:
        """Settings of the session gate; ``None`` without a gate."""
        return None if self.requests.session_gate == GATE_OFF else GateSettings()


def options_of(server_args: Any) -> ServerOptions:
    """Return the options of a server; the defaults if it read no command line."""
    return getattr(server_args, ATTRIBUTE, None) or ServerOptions()
