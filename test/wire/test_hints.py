"""Hints without a request: accepted hints, waiting hints, and delivery to every scheduler."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_canopy.errors import CanopyError
from sglang_canopy.records import CLIENT, GATEWAY
from sglang_canopy.wire.hints import (
    MAX_HINTS_PER_MESSAGE,
    MAX_TENANT_BURST,
    MAX_WAITING_HINTS,
    MAX_WAITING_OF_TENANT,
    TENANT_HINTS_PER_S,
    TooManyHints,
    WaitingHints,
    deliver,
    pack,
    unpack,
)


async def pause_nothing() -> None:
    pass


def over_hint(conversation: str, salt: str | None = None) -> dict:
    return {"conversation": conversation, "over": True, "cache_salt": salt}


@pytest.fixture
def waiting():
    return WaitingHints()


def test_the_last_hint_of_a_conversation_counts(waiting) -> None:
    waiting.add({"conversation": "a", "over": True}, 1.0)
    waiting.add({"conversation": "a", "return_in_s": 5}, 2.0)
    assert waiting.take() == [
        {"tenant": None, "conversation": "a", "return_in_s": 5.0, "time": 2.0, "source": "client"}
    ]
    assert not waiting.take()


@pytest.mark.parametrize("later_fields", [{"return_in_s": 5.0}, {"over": True}, {"keep_s": 5.0}])
def test_a_later_hint_does_not_shorten_a_keep_that_waits(waiting, later_fields: dict) -> None:
    waiting.add({"conversation": "a", "keep_s": 60}, 1.0)
    waiting.add({"conversation": "a", **later_fields}, 2.0)
    (hint,) = waiting.take()
    assert hint == {**hint, **later_fields, "keep_s": 59.0, "time": 2.0}

    async def fail(_key: str) -> None:
        waiting.add({"conversation": "a", **later_fields}, 2.0)
        raise ConnectionError

    waiting.add({"conversation": "a", "keep_s": 60}, 1.0)
    with pytest.raises(ConnectionError):
        asyncio.run(deliver(waiting, fail, pause_nothing))
    assert waiting.take() == [hint]


@pytest.mark.parametrize(
    "hint",
    [
        None,
        [],
        {},
        {"conversation": "a"},
        {"over": True},
        {"conversation": "a", "turn": 1},
        {"conversation": "a", "over": True, "cache_salt": ["s"]},
        {"conversation": "a", "over": True, "extra_key": 1},
        {"conversation": "a", "return_in_s": 10**400},
        {"conversation": "\ud800", "over": True},
        {"conversation": "a", "over": True, "\n" * 100: 1},
    ],
)
def test_an_empty_or_unknown_hint_is_refused(hint: object) -> None:
    with pytest.raises(CanopyError):
        WaitingHints().add(hint, 0.0)


def test_a_tenant_with_too_many_hints_is_refused_and_others_are_not(waiting) -> None:
    for i in range(MAX_WAITING_OF_TENANT):
        waiting.add(over_hint(f"c{i}", "heavy"), 0.0)
    with pytest.raises(TooManyHints, match="already waiting"):
        waiting.add(over_hint("one more", "heavy"), 0.0)
    waiting.add(over_hint("c0", "heavy"), 1.0)  # another hint of a conversation takes no place
    waiting.add(over_hint("c0", "light"), 1.0)
    assert len(waiting) == MAX_WAITING_OF_TENANT + 1


def test_hints_of_all_tenants_are_bounded_and_sent_in_turns(waiting) -> None:
    for tenant in range(MAX_WAITING_HINTS // MAX_WAITING_OF_TENANT):
        for i in range(MAX_WAITING_OF_TENANT):
            waiting.add(over_hint(f"c{i}", f"t{tenant}"), 0.0)
    waiting.add(over_hint("last", "late"), 1.0)
    assert len(waiting) == MAX_WAITING_HINTS
    first_message = waiting.take()
    assert len(first_message) == MAX_HINTS_PER_MESSAGE
    tenants = {hint["tenant"] for hint in first_message}
    assert len(tenants) == 1 + MAX_WAITING_HINTS // MAX_WAITING_OF_TENANT


def test_hints_that_could_not_be_sent_wait_again_unless_newer_ones_came(waiting) -> None:
    for i in range(3):
        waiting.add(over_hint(f"c{i}"), 1.0)

    async def fail(_key: str) -> None:
        waiting.add({"conversation": "c1", "return_in_s": 9}, 2.0)
        raise ConnectionError

    with pytest.raises(ConnectionError):
        asyncio.run(deliver(waiting, fail, pause_nothing))
    assert len(waiting) == 3
    hints = {hint["conversation"]: hint for hint in waiting.take()}
    assert hints.keys() == {"c0", "c1", "c2"}
    assert hints["c1"]["return_in_s"] == 9.0


def test_all_waiting_hints_are_sent_with_those_that_arrive_meanwhile() -> None:
    waiting, messages = WaitingHints(), []
    for i in range(150):
        waiting.add(over_hint(f"c{i}", "ab"[i % 2]), 1.0)

    async def send(key: str) -> None:
        if not messages:
            waiting.add(over_hint("meanwhile"), 2.0)
        messages.append(unpack(key))

    asyncio.run(deliver(waiting, send, pause_nothing))
    assert [*map(len, messages)] == [MAX_HINTS_PER_MESSAGE, 151 - MAX_HINTS_PER_MESSAGE]
    conversations = {hint["conversation"] for hints in messages for hint in hints}
    assert conversations >= {"c0", "c149", "meanwhile"}
    assert len(waiting) == 0


def test_hints_during_a_pause_are_one_message() -> None:
    waiting, message_sizes = WaitingHints(), []
    waiting.add(over_hint("first"), 1.0)

    async def send(key: str) -> None:
        message_sizes.append(len(unpack(key)))

    async def pause() -> None:
        for i in range(30 if len(message_sizes) < 5 else 0):
            waiting.add(over_hint(f"{len(message_sizes)}-{i}"), 1.0)

    asyncio.run(deliver(waiting, send, pause))
    assert message_sizes == [1, 30, 30, 30, 30]


def test_a_tenants_clients_are_refused_above_their_rate_and_a_gateway_is_not(waiting) -> None:

    def count_accepted(tenant: str, now: float, source: str = CLIENT) -> int:
        for i in range(MAX_TENANT_BURST + 100):
            try:
                waiting.add(over_hint("the same", tenant), now, source)
            except TooManyHints:
                return i
        return MAX_TENANT_BURST + 100

    assert count_accepted("heavy", 0.0) == MAX_TENANT_BURST
    assert count_accepted("heavy", 0.5) == TENANT_HINTS_PER_S / 2
    assert count_accepted("light", 0.5) == MAX_TENANT_BURST
    assert count_accepted("heavy", 0.5, GATEWAY) == MAX_TENANT_BURST + 100


def test_the_message_carries_hints_unchanged(waiting) -> None:
    waiting.add({"conversation": "\u00e9", "keep_s": 3, "cache_salt": "\ud800"}, 1.5)
    hints = waiting.take()
    key = pack(hints)
    assert key.isascii()
    assert unpack(key) == hints


@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(
                st.sampled_from(["tenant", "conversation", "time", "over", "keep_s", "x"]), inner
            )
        ),
    )
)
def test_nothing_in_a_forged_message_raises(forged_hints: object) -> None:
    for hint in unpack(pack(forged_hints)):  # type: ignore[arg-type]
        assert isinstance(hint["conversation"], str)
        assert hint["time"] == hint["time"]


@pytest.mark.parametrize("text", ["", "[", "[" * 100_000, "1", '[{"conversation": "a"}]'])
def test_a_message_that_is_no_list_of_hints_holds_none(text: str) -> None:
    assert unpack(text) == []
