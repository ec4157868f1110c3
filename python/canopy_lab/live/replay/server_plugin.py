"""A server's part of a replay, as a plugin: it generates the trace's tokens.

Without ``--canopy-enable-forced-output`` it only adds that flag.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from canopy_lab.live.replay.forced_output import ATTRIBUTE, HOOKS
from sglang_canopy.declared import declare
from sglang_canopy.server.start.addon import Addon
from sglang_canopy.server.start.self_check import stop

FLAG = "--canopy-enable-forced-output"


@dataclass(frozen=True, slots=True)
class ReplayFlags:
    forced_output: bool = declare(
        False,
        FLAG,
        "Make responses consist of the token ids in custom_params.canopy_force_output. For "
        "replaying traces; keep it off in production.",
        hidden=True,
    )


def store_flag(server_args: Any, args: Any) -> bool:
    """Store the flag with the arguments, and return it."""
    is_forced = bool(getattr(args, "canopy_enable_forced_output", False))
    setattr(server_args, ATTRIBUTE, is_forced)
    if is_forced and server_args.speculative_algorithm:
        stop(f"{FLAG}: speculative decoding samples several tokens at once; drop one")
    return is_forced


ADDON = Addon("replay", ReplayFlags, store_flag, lambda: HOOKS)
load, load_for_help = ADDON.load, ADDON.load_for_help
