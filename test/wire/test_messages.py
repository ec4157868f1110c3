"""Messages to the schedulers: one prefix, one route and one handler for each kind."""

import asyncio
from types import SimpleNamespace
from typing import Any

from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.wire import messages
from sglang_canopy.wire.messages import DOCUMENTS, HINTS, MESSAGE_KINDS, TIME, parse_kind


def test_every_kind_has_its_own_prefix_and_a_handler() -> None:
    prefixes = [kind.prefix for kind in MESSAGE_KINDS]
    assert [parse_kind(prefix) for prefix in prefixes] == [*MESSAGE_KINDS]
    assert len(set(prefixes)) == len(prefixes)
    assert parse_kind("pp_max_micro_batch_size") is None
    assert parse_kind(7) is None
    # The documents' plugin has its own handler.
    kinds = [kind for kind in MESSAGE_KINDS if kind is not DOCUMENTS]
    assert all(messages._handlers.get(kind) for kind in kinds)


def test_sent_texts_are_received_in_order(monkeypatch: Any) -> None:
    received: list[list[str]] = []

    def receive(_: Any, texts: list[str]) -> bool:
        received.append(texts)
        return True

    monkeypatch.setitem(messages._handlers, HINTS, receive)

    class Manager:
        async def set_internal_state_communicator(self, message: Any) -> list[Any]:
            return [arrivals.receive_messages(None, SimpleNamespace(), message)] * 2

    answers = asyncio.run(messages.send(Manager(), HINTS, "a", "b:c", ""))
    assert received == [["a", "b:c", ""]]
    assert [answer.updated for answer in answers] == [True, True]


def test_a_server_without_documents_passes_their_commands_to_sglang() -> None:
    scheduler = SimpleNamespace(tree_cache=SimpleNamespace())
    keys = {DOCUMENTS.key("pin:x:"): 1}
    message = SimpleNamespace(server_args=keys)
    assert messages.handle_messages(scheduler, keys) is None
    assert arrivals.receive_messages(lambda _, message: message, scheduler, message) is message
    assert messages.handle_messages(scheduler, {TIME.key("nan"): 1, 5: 1}) is True
