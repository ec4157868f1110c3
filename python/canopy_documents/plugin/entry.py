"""Entry point of document reuse. Without ``--canopy-documents`` it only adds that flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from canopy_documents import ATTRIBUTE
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.setups import DOCUMENTS, FLAGS
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start.addon import Addon
from sglang_canopy.server.start.hook import Hook
from sglang_canopy.server.start.self_check import stop

FLAG = FLAGS[DOCUMENTS]
OFF = "off"


@dataclass(frozen=True, slots=True)
class DocumentFlags:
    """The flag for documents, with the keys of ``canopy_documents.server.options.ReuseOptions``."""

    documents: str = declare(
        OFF,
        FLAG,
        "Reuse the KV of documents at any position of a prompt: 'on', KEY=VALUE,... or a JSON "
        "object. Approximate: docs/guide/documents.md.",
        metavar="on | KEY=VALUE,...",
        former_flag="--canopy-chunks",
    )


def parse_options(server_args: Any, args: Any) -> bool:
    """Check the flag's keys and store them with the arguments. Returns whether reuse is on."""
    setattr(server_args, ATTRIBUTE, None)
    if getattr(args, "canopy_documents", None) in (None, OFF):
        return False
    from canopy_documents.server import options

    try:
        document_options = options.parse(args.canopy_documents)
        if document_options.reuse == OFF:
            return False
        if refusal := unsupported_reason(DOCUMENTS, server_args):
            raise CanopyError(refusal)
        options.check_server(server_args, document_options)
    except CanopyError as error:
        stop(f"{FLAG}: {error}")
    setattr(server_args, ATTRIBUTE, document_options)
    return True


def _hooks() -> tuple[Hook, ...]:
    from canopy_documents.plugin import hooks

    hooks.attach()
    return hooks.HOOKS


ADDON = Addon("documents", DocumentFlags, parse_options, _hooks)
load, load_for_help = ADDON.load, ADDON.load_for_help
