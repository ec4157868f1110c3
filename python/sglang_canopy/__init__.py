"""Canopy: a workload-aware, tiered radix cache for SGLang.

Importing this package imports neither torch nor sglang: the policies, the traces and the simulator
work without a server. ``server/start/hooks.py`` lists the hooks into SGLang.
"""

import importlib.abc
import sys
from typing import Any

__version__ = "0.1.0"

SGLANG_VERSION = "0.5.23"
"""The pinned release of SGLang; ``releases.TESTED_RELEASES`` has the others that are tested."""


class _StaleEntryPoint(importlib.abc.MetaPathFinder):
    """Stops a process that loads an entry point whose module no longer exists. Otherwise SGLang
    logs the import error and serves without Canopy. This happens if a checkout is updated and not
    installed again."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raise ``SystemExit`` for a missing module of an entry point."""
        if not fullname.startswith((f"{__name__}.", "canopy_documents.")):
            return
        from importlib.metadata import entry_points

        for group in ("sglang.srt.plugins", "sglang.srt.platforms"):
            for entry_point in entry_points(group=group):
                if f"{entry_point.module}.".startswith(f"{fullname}."):
                    raise SystemExit(
                        f"sglang-canopy: the installed entry point names {entry_point.module}, which this "
                        "version does not have; install it again: pip install --no-deps -e ."
                    )


if not any(type(finder).__name__ == _StaleEntryPoint.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_StaleEntryPoint())
