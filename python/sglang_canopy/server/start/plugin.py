"""Entry points of the plugin.

SGLang calls ``load`` in every serving process (entry point ``sglang.srt.plugins``). It registers the
hooks in ``hooks.HOOKS``; ``self_check`` later verifies that each is in place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.server.start.arguments import add_flags
from sglang_canopy.server.start.hooks import HOOKS
from sglang_canopy.server.start.self_check import check_signature, check_version, stop

_loaded = False


def load() -> None:
    """Register every hook (entry point ``sglang.srt.plugins``). Idempotent."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    try:
        check_version()
        for hook in HOOKS:
            check_signature(hook)
        _register_policies()
        for hook in HOOKS:
            hook.register()
        _support_cpu()
    except SystemExit:
        raise
    except Exception as error:
        stop(f"could not load ({type(error).__name__}: {error})")


def load_for_help() -> None:
    """Add Canopy's options to ``sglang serve --help`` (entry point ``sglang.srt.platforms``). That
    command resolves the platform before it prints its help, but loads general plugins later. This
    function registers no platform, and does nothing without ``--help``."""
    if add_to_help(add_flags):
        _register_policies()


def add_to_help(add: Callable[[Any, Any], None]) -> bool:
    """Make parsers call ``add(None, parser)``, if ``--help`` is given. Returns whether it is."""
    if not {"-h", "--help"} & set(sys.argv):
        return False
    # NOTE: SGLang's argument module is partially imported here, so its parser cannot be hooked.
    parse = argparse.ArgumentParser.parse_args

    def parse_with_flags(parser: Any, *args: Any, **kwargs: Any) -> Any:
        add(None, parser)
        return parse(parser, *args, **kwargs)

    argparse.ArgumentParser.parse_args = parse_with_flags  # type: ignore[method-assign, assignment]
    return True


def _support_cpu() -> None:
    """Install ``canopy_cpu`` if torch finds no CUDA (or ROCm) device. Raises ``CanopyError``."""
    import torch

    if torch.cuda.is_available():
        return
    try:
        import canopy_cpu
    except ModuleNotFoundError:
        raise CanopyError(
            "torch finds no CUDA device, and SGLang serves on a CPU only with canopy-sgl-kernel-cpu: "
            "`pip install --no-deps ./sgl-kernel/cpu`"
        ) from None
    canopy_cpu.install()


def _register_policies() -> None:
    """Add Canopy's policies to the choices of ``--radix-eviction-policy``."""
    from sglang.srt.arg_groups.choices import (
        RADIX_EVICTION_POLICY_CHOICES,
        add_radix_eviction_policy_choices,
    )

    add_radix_eviction_policy_choices(
        [n for n in (AUTO, *live_names()) if n not in RADIX_EVICTION_POLICY_CHOICES]
    )
