"""Messages from the HTTP process to every scheduler, as keys of SGLang's ``SetInternalStateReq``.

A message is a key of ``server_args``: the prefix of its kind, then its text. Only one route may send a
kind. The schedulers call the handler that a kind's owner registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class MessageKind:
    """One kind of message."""

    prefix: str
    route: str
    """The only route that may send it."""

    def key(self, text: str) -> str:
        return self.prefix + text


TIME = MessageKind("canopy_time:", "/canopy/status")
"""Seconds on the requests' clock: sessions fade even without requests."""
EXPLAIN = MessageKind("canopy_explain:", "/canopy/explain")
HINTS = MessageKind("canopy_hints:", "/canopy/hint")
DOCUMENTS = MessageKind("canopy_documents:", "/canopy/documents")
"""Tenants whose documents are deleted."""
DRAIN = MessageKind("canopy_drain:", "SIGTERM")
"""The server received SIGTERM: the time for the drain begins."""
MESSAGE_KINDS = (TIME, EXPLAIN, HINTS, DOCUMENTS, DRAIN)
"""All kinds, first match first."""

MessageHandler = Callable[[Any, list[str]], bool | None]
"""Takes a scheduler and the texts of its messages of one kind. Returns whether they were applied;
``None`` if this server does not support the kind."""
_handlers: dict[MessageKind, MessageHandler] = {}


def register_handler(kind: MessageKind, handler: MessageHandler) -> None:
    """Call ``handler`` for messages of ``kind``."""
    _handlers[kind] = handler


async def send(manager: Any, kind: MessageKind, *texts: str) -> list[Any]:
    """Send ``texts`` to every scheduler through SGLang's tokenizer manager. Returns one answer per
    replica. A client's request to SGLang's own route with these keys is refused (``early_checks``)."""
    from sglang.srt.managers.io_struct import SetInternalStateReq

    request = SetInternalStateReq(server_args=dict.fromkeys(map(kind.key, texts), 1))
    answers: list[Any] = await manager.set_internal_state_communicator(request)
    return answers


def handle_messages(scheduler: Any, keys: Iterable[Any]) -> bool | None:
    """Handle the messages of the first kind in ``keys``. Returns its handler's result; ``None`` without
    a handled message."""
    for kind in MESSAGE_KINDS:
        texts = [key.removeprefix(kind.prefix) for key in map(str, keys) if parse_kind(key) is kind]
        if texts:
            handler = _handlers.get(kind)
            return None if handler is None else handler(scheduler, texts)
    return None


def parse_kind(key: Any) -> MessageKind | None:
    """Return the kind of a message; ``None`` for an SGLang key."""
    return next((kind for kind in MESSAGE_KINDS if str(key).startswith(kind.prefix)), None)
