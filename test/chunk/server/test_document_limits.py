"""Limits of the routes of documents: messages that clients may send to the scheduler's thread."""

import asyncio
from typing import Any

import pytest

pytest.importorskip("sglang")


from canopy_chunks.server.http import calls
from canopy_chunks.server.http.limits import CHANGE, READ, REGISTER, DocumentLimits
from sglang_canopy.request.access import Refused
from support.served_routes import Manager


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Counting(Manager):
    """Counts the readings that would reach a scheduler."""

    readings = 0

    async def get_internal_state(self) -> list[dict[str, Any]]:
        self.readings += 1
        return [{"canopy_chunks": {"reading": self.readings}}]


def test_a_flood_of_readings_is_a_bounded_number_of_messages() -> None:
    clock, manager = Clock(), Counting()
    limits = DocumentLimits(clock=clock)
    per_s, burst = READ

    async def flood() -> None:
        for i in range(1000):
            clock.now = 100.0 + i / 100
            found = await limits.counters(lambda: calls.state(manager))
            assert found["reading"] == manager.readings

    asyncio.run(flood())
    assert manager.readings <= burst + 10 * per_s + 1
    clock.now += 60.0
    assert asyncio.run(limits.counters(lambda: calls.state(manager))) == {
        "reading": manager.readings
    }
    assert manager.readings > burst


@pytest.mark.parametrize(("method", "limit"), [("register", REGISTER), ("change", CHANGE)])
def test_a_flood_of_changes_is_refused_and_other_tenants_are_not(method: str, limit: Any) -> None:
    clock = Clock()
    count = getattr(DocumentLimits(clock=clock), method)
    for _ in range(limit[1]):
        count("flood")
    with pytest.raises(Refused, match="admin-api-key") as refused:
        count("flood")
    assert (refused.value.status, refused.value.retry_after_s) == (429, 1)
    count("honest")
    clock.now += 1.0
    count("flood")


def test_an_administrator_is_not_limited() -> None:
    limits = DocumentLimits(is_on=False)
    for _ in range(10 * REGISTER[1]):
        limits.register(None)


def test_a_command_over_several_documents_is_one_message() -> None:
    manager = Manager()
    assert asyncio.run(calls.command(manager, "pin", ["a", "b"], "t"))
    assert [len(message) for message in manager.sent] == [2]
