"""Entry points of document reuse: a separate plugin, which without ``--canopy-chunks`` only adds that
flag.

The launching process installs the hooks if its command line enables documents. Its children inherit a
variable, and install them when SGLang loads plugins.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from canopy_chunks.plugin.refusals import ATTRIBUTE, CHUNKS, FLAG, OFF, is_requested
from sglang_canopy import declared
from sglang_canopy.config.refusals import unsupported
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start import plugin
from sglang_canopy.server.start.seam import Seam
from sglang_canopy.server.start.self_check import check_in_place, check_signature, stop

VARIABLE = "CANOPY_CHUNKS_INSTALL"
"""Set for the children of a server that reuses documents."""
_loaded = False


@dataclass(frozen=True, slots=True)
class DocumentFlags:
    """The flag for documents. Its keys are ``canopy_chunks.server.options.Options``."""

    chunks: str = declare(
        OFF,
        FLAG,
        "Reuse the KV of documents at any position of a prompt: 'on', KEY=VALUE,... or a JSON "
        "object. Approximate: docs/guide/documents.md.",
        metavar="on | KEY=VALUE,...",
    )


def load() -> None:
    """Register the flag's hooks, or all in a child of a server with documents (entry point
    ``sglang.srt.plugins``). Idempotent."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    plugin.load()  # Canopy's own hooks come first, inside the hooks of documents
    try:
        for seam in (*SEAMS, *(_hooks() if os.environ.get(VARIABLE) else ())):
            check_signature(seam)
            seam.register()
    except Exception as error:
        stop(f"could not load the reuse of documents ({type(error).__name__}: {error})")


def load_for_help() -> None:
    """Add the flag to ``sglang serve --help`` (entry point ``sglang.srt.platforms``), as Canopy's
    plugin does with its own."""
    plugin.add_to_help(_add_to_server)


def _add_to_server(result: Any, parser: argparse.ArgumentParser) -> None:
    if "--radix-eviction-policy" in parser._option_string_actions:
        add_flag(result, parser)


def add_flag(_result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
    """Hook after ``ServerArgs.add_cli_args``."""
    if FLAG not in parser._option_string_actions:
        declared.add_flags(parser.add_argument_group("canopy documents"), DocumentFlags)


def keep_options(server_args: Any, args: Any) -> bool:
    """Check the flag's keys and store them with the arguments. Returns whether documents are
    reused."""
    setattr(server_args, ATTRIBUTE, None)
    if not is_requested(args):
        return False
    from canopy_chunks.server import options

    try:
        given = options.PARSE(args.canopy_chunks)
        if given.reuse == OFF:
            return False
        if refusal := unsupported(CHUNKS, server_args):
            raise CanopyError(refusal)
        options.check_server(server_args, given)
    except CanopyError as error:
        stop(f"{FLAG}: {error}")
    setattr(server_args, ATTRIBUTE, given)
    return True


def _parsed(server_args: Any, _cls: Any, args: Any, *_: Any, **__: Any) -> None:
    """Hook after ``ServerArgs.from_cli_args``: install the hooks here and in later children, if
    documents are reused."""
    check_in_place(SEAMS)
    if not keep_options(server_args, args):
        os.environ.pop(VARIABLE, None)
        return
    os.environ[VARIABLE] = "1"
    _install_now()


def _hooks() -> tuple[Seam, ...]:
    from canopy_chunks.plugin import hooks

    hooks.attach()
    return hooks.SEAMS


def _install_now() -> None:
    """Install the hooks after SGLang has installed all others. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = _hooks()
    if not all(seam.is_in_place() for seam in seams):
        targets = defaultdict(list)
        for seam in seams:
            check_signature(seam)
            targets[seam.target].append((HookType(seam.kind), seam.registered, None))
        for target, hooks in targets.items():
            # NOTE: ``apply_hooks`` skips functions that have hooks already.
            HookRegistry._apply_target(target, hooks)
    check_in_place(seams)


_SRT = "sglang.srt."
SEAMS = (
    Seam(
        _SRT + "server_args.ServerArgs.add_cli_args",
        "after",
        add_flag,
        ("parser",),
        f"add `{FLAG}`",
    ),
    Seam(
        _SRT + "server_args.ServerArgs.from_cli_args",
        "after",
        _parsed,
        ("cls", "args"),
        f"check `{FLAG}`, and install the hooks of documents if it is given",
    ),
)
"""Hooks on every server with this plugin."""
