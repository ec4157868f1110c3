"""All that Canopy's flags ask of a server, as one object on SGLang's ``ServerArgs``.

``server/arguments.py`` makes it from the command line; SGLang hands its arguments to every process
and rank. Secrets are not in it: SGLang logs its arguments and shows them to clients.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang_canopy.admission.settings import OFF, GateSettings
from sglang_canopy.config.queue import QueueFlags
from sglang_canopy.config.tiers import TierOptions
from sglang_canopy.config.whatif import MeterOptions
from sglang_canopy.declared import declare, keyed
from sglang_canopy.request import client_hints, identity, owner

ATTRIBUTE = "_canopy_options"
"""Where the options are on ``ServerArgs``."""
GATE_FLAG = "--canopy-session-gate"


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What requests may ask for, whose they are, and when their sessions start."""

    forced_output: bool = declare(
        False,
        "--canopy-enable-forced-output",
        "Obey custom_params.canopy_force_output, a list of token ids that the response must "
        "consist of. For replaying traces; keep it off in production.",
        hidden=True,
    )
    client_hints: str = declare(
        client_hints.ON,
        client_hints.FLAG,
        "Whose hints change what is evicted (POST /canopy/hint, and the fields canopy_over, "
        "canopy_return_in_s, canopy_keep_s, canopy_ttl_s, canopy_pin_s and canopy_parent of "
        "requests): everybody's, nobody's, or only those with the admin key or from a gateway that "
        f"sends the secret of ${client_hints.SECRET_VARIABLE} (or of the file "
        f"${client_hints.SECRET_FILE_VARIABLE}) as the header {client_hints.GATEWAY_HEADER}.",
        choices=client_hints.MODES,
        hidden=True,
    )
    identity_sources: tuple[str, ...] = declare(
        identity.sources_of(identity.SESSIONS),
        identity.FLAG,
        "Which fields and headers of clients, agents and gateways name the conversation of a "
        "request, beside canopy_conversation: sessions (those that name one conversation), all "
        "(those that name a user, too), none, or some of them with commas between.",
        metavar="LIST",
        parse=identity.sources_of,
        shown_default=identity.SESSIONS,
        hidden=True,
    )
    require_tenant: str = declare(
        owner.OFF,
        owner.FLAG,
        "What becomes of a generation request that names no tenant (cache_salt, extra_key), which a "
        "gateway may have dropped: off warns once if other requests name one, warn warns once in "
        "any case, on answers 400.",
        choices=owner.MODES,
        hidden=True,
    )
    carriers: str = declare(
        owner.NO_CARRIERS,
        owner.CARRIERS_FLAG,
        "Where else a generation request may name its tenant, for gateways that drop the body's own "
        f"fields: metadata ({owner.METADATA['cache_salt']}, {owner.METADATA['extra_key']}, and our "
        f"other keys too), headers ({owner.HEADERS['cache_salt']}, {owner.HEADERS['extra_key']}), or "
        "both. Your outermost gateway must overwrite those places.",
        choices=owner.CARRIERS,
        hidden=True,
    )
    session_gate: GateSettings = declare(
        GateSettings(mode=OFF),
        GATE_FLAG,
        "What becomes of the first request of a session for which there is no room beside those "
        "under way: it waits in the queue (queue), or is refused with status 429 and Retry-After "
        "(reject). For agents that thrash.",
        metavar="MODE[,KEY=VALUE...]",
        parse=keyed(GateSettings, head="mode"),
        shown_default=OFF,
        hidden=True,
    )


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How this server was started."""

    requests: RequestOptions = field(default_factory=RequestOptions)
    queue: QueueFlags = field(default_factory=QueueFlags)
    tiers: TierOptions = field(default_factory=TierOptions)
    meter: MeterOptions | None = None
    """``None`` without a what-if meter."""

    @property
    def gate(self) -> GateSettings | None:
        """``None`` without a session gate."""
        gate = self.requests.session_gate
        return None if gate.mode == OFF else gate


def options_of(server_args: Any) -> ServerOptions:
    """The options of a server; the defaults where it read no command line."""
    return getattr(server_args, ATTRIBUTE, None) or ServerOptions()
