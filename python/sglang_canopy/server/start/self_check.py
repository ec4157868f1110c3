"""Verify that Canopy's hooks are in place, on the SGLang version that they were written for.

SGLang logs and swallows a plugin's exceptions and failed hooks, and would run without the feature. A
failure here therefore ends the process with the reason and the fix.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from sglang_canopy import SGLANG_VERSION
from sglang_canopy.policy.registry import live_names
from sglang_canopy.server.start import digests
from sglang_canopy.server.start.seam import Seam

_compared = False


def stop(reason: str) -> NoReturn:
    """End the process with one line. ``except Exception`` in SGLang does not catch this."""
    raise SystemExit(f"sglang-canopy: {reason}")


def check_version() -> None:
    """Stop unless the pinned SGLang is installed."""
    found = importlib.metadata.version("sglang")
    if found != SGLANG_VERSION:
        stop(
            f"it hooks sglang {SGLANG_VERSION}, but sglang {found} is installed; run "
            f"'pip install --no-deps sglang=={SGLANG_VERSION}', or uninstall sglang-canopy "
            "to run without it"
        )


def check_signature(seam: Seam) -> None:
    """Stop unless SGLang has the function, with the parameters that the hook expects."""
    try:
        found = seam.parameters_found()
    except (ImportError, AttributeError) as error:
        stop(f"sglang has no {seam.target} ({error})")
    if found[: len(seam.parameters)] != seam.parameters:
        stop(
            f"{seam.target} takes ({', '.join(found)}), expected ({', '.join(seam.parameters)}, "
            "...); this sglang was modified"
        )


def check_in_place(seams: Iterable[Seam]) -> None:
    """Stop, naming the hook, unless every hook is in place and SGLang's source unmodified."""
    from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES

    _check_source()
    for seam in seams:
        if not seam.is_in_place():
            stop(f"the hook on {seam.target} did not apply (see the log above)")
    missing = set(live_names()) - set(RADIX_EVICTION_POLICY_CHOICES)
    if missing:
        stop(f"policies not registered with --radix-eviction-policy: {sorted(missing)}")


def _check_source() -> None:
    """Compare SGLang's source with the recorded digests, once per process."""
    global _compared
    if _compared:
        return
    import sglang

    found = digests.changed(Path(sglang.__path__[0]), digests.read_table())
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        stop(
            f"{', '.join(found[:3])}{more}: not as in sglang {SGLANG_VERSION}, which Canopy was "
            "written against; this sglang was modified, so install that version anew, or "
            "uninstall sglang-canopy to run without it"
        )
    _compared = True
