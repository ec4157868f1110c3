"""Refusals at the start, from the rows of ``setups``.

They are checked on the command line, for an early error, and when each scheduler builds its cache, which
no way of starting SGLang bypasses (``sglang.Engine`` reads no command line).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_canopy.config.setups import DISK, FLAGS, POLICIES, SETUPS, Setup

_OPT_OUTS = {feature: f"leave out {flag}" for feature, flag in FLAGS.items()}
_OPT_OUTS |= {POLICIES: "use --radix-eviction lru", DISK: "leave out --hicache-storage-backend"}


def unsupported_reason(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Return the reason why ``feature`` (of ``setups.FLAGS``) cannot run; ``None`` if it can.
    ``configured``: a ``ServerArgs``, and the ``TreeCacheBuildContext`` if it exists."""
    return next(unsupported_reasons(feature, *configured, environment=environment), None)


def unsupported_reasons(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> Iterator[str]:
    """Yield every reason why ``feature`` cannot run, in order of precedence."""
    for reason, setup in refusing_setups(feature, *configured, environment=environment):
        remedies = [text for text in (setup.remedy_text, _OPT_OUTS[feature]) if text]
        yield f"{reason}; {', or '.join(remedies)}"


def refusing_setups(
    feature: str, *configured: Any, environment: Mapping[str, str] = os.environ
) -> Iterator[tuple[str, Setup]]:
    """Yield every row that refuses ``feature``, with its reason, in order of precedence."""
    for setup in SETUPS:
        reason = setup.reason(feature)
        if reason is None:
            continue
        for value in _configured_values(setup, configured, environment):
            if setup.applies(value):
                yield reason.format(value), setup
                break


def _configured_values(
    setup: Setup, configured: tuple[Any, ...], environment: Mapping[str, str]
) -> Iterator[Any]:
    """Yield the option's values in all configured objects, else its variable's value."""
    options = [getattr(source, setup.option, None) for source in configured] if setup.option else []
    values = [value for value in options if value is not None]
    if not values and setup.variable:
        values = [environment.get(setup.variable) or None]
    yield from values or [None]
