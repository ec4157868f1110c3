"""Verify that SGLang has the functions that Canopy hooks, and that the hooks are in place.

The behaviour of the tree is tested when a scheduler builds its cache (``radix/self_test.py``).

SGLang logs and swallows a plugin's exceptions and failed hooks, and would run without the feature. A
failure here therefore ends the process with the reason and the fix.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable
from typing import NoReturn

from sglang_canopy import releases
from sglang_canopy.policy.registry import live_names
from sglang_canopy.server.start.hook import Hook

logger = logging.getLogger(__name__)


def stop(reason: str) -> NoReturn:
    """End the process with one line. ``except Exception`` in SGLang does not catch this."""
    raise SystemExit(f"sglang-canopy: {reason}")


def check_version() -> None:
    """Warn of a release that Canopy is not tested with. The other checks decide whether it starts."""
    installed = importlib.metadata.version("sglang")
    if installed not in releases.TESTED_RELEASES:
        logger.warning(
            "sglang-canopy is tested with sglang %s, and %s is installed. The checks at start decide "
            "whether it is used; python -m sglang.launch_server without Canopy's flags is plain SGLang.",
            releases.RELEASE_RANGE,
            installed,
        )


def check_signature(hook: Hook) -> None:
    """Check that SGLang has the function, with the parameters that the hook expects. If not, the hook
    is switched off. If Canopy cannot do without it, ``check_complete`` stops."""
    reason = _find_difference(hook)
    if reason is None:
        return
    if not hook.fallback:
        releases.START_REFUSALS.append(reason)
    consequence = hook.fallback or "a server with flags of Canopy does not start"
    releases.switch_off(hook.target, f"{reason}; {consequence}")


def check_complete() -> None:
    """Stop a server with flags of Canopy if SGLang lacks a function that Canopy needs."""
    for reason in releases.START_REFUSALS:
        stop(
            f"{reason}; install a tested sglang ({releases.RELEASE_RANGE}), or start without flags of Canopy"
        )


def _find_difference(hook: Hook) -> str | None:
    try:
        parameters = hook.sglang_parameters()
    except (ImportError, AttributeError) as error:
        return f"this sglang has no {hook.target} ({error})"
    if parameters[: len(hook.parameters)] == hook.parameters:
        return None
    return f"{hook.target} takes ({', '.join(parameters)}), expected ({', '.join(hook.parameters)}, ...)"


def check_in_place(hooks: Iterable[Hook]) -> None:
    """Stop, naming the hook, unless every hook is in place."""
    from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES

    for hook in hooks:
        if not hook.is_in_place():
            stop(f"the hook on {hook.target} did not apply (see the log above)")
    missing = set(live_names()) - set(RADIX_EVICTION_POLICY_CHOICES)
    if missing:
        stop(f"policies not registered with --radix-eviction-policy: {sorted(missing)}")
