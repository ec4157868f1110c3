"""A client may use a new name in every request. No container of the scheduler grows with the names.

Names are salts (tenants), conversations, parents and categories. The clock advances ten seconds per
request, so containers with a time limit stay small, and only the number of names could fill the
others."""

import functools
import itertools
from collections.abc import Callable

import pytest

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.radix import missed
from sglang_canopy.radix.counters import INVALID
from sglang_canopy.records import CLIENT, GATEWAY, LateHint
from sglang_canopy.schedule.bounded_shortest import BoundedShortest
from sglang_canopy.schedule.cost import Prefill
from sglang_canopy.server.scheduler.observer import Observer
from sglang_canopy.tenant import Vouched
from sglang_canopy.whatif import meter
from sglang_canopy.whatif.meter import Meter, MeterSetup, TierTokens
from sglang_canopy.whatif.sampled_caches import Origins
from support.containers import count_entries, grown_containers
from support.live_tree import LiveTree, fake_req

KV_TOKENS = 512
PROMPT_TOKENS = 80
"""More than a block of 64 tokens: the learner ignores shorter prompts."""
SLACK_ENTRIES = 512
"""Allowed growth: the number of a heap's outdated entries varies."""


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch) -> None:
    """Set bounds that are reached before growth is measured."""
    monkeypatch.setattr(meter, "Origins", functools.partial(Origins, 256))
    monkeypatch.setattr(missed, "MIN_BLOCKS", 256)


class Server:
    """The parts of a scheduler that receive names from clients."""

    def __init__(self, policy: str) -> None:
        self.tree = LiveTree(KV_TOKENS, policy, {"quantum_tokens": 1}, host_tokens=2 * KV_TOKENS)
        self.core = self.tree.core
        self.live = self.core.live
        self.live.meter = Meter(MeterSetup(), TierTokens(KV_TOKENS), policy)
        self.gate = SessionGate(GateSettings(always=True), KV_TOKENS)
        self.order = BoundedShortest()
        self.observer = Observer(Meter(MeterSetup(), TierTokens(KV_TOKENS), "lru"))
        self._numbers = itertools.count()

    def serve(self, **names: str | None) -> None:
        """Serve one request with these names, from its arrival to its end."""
        number = next(self._numbers)
        time = 10.0 * number
        tokens = [7 * number + i for i in range(PROMPT_TOKENS)]
        tenant = names.pop("tenant", None)
        is_vouched = names.get("source") == GATEWAY
        req = fake_req(tokens, [3, 4], {"time": time, **names}, cache_salt=tenant)
        request = self.core.requests.register(req)
        self.gate.arrive(number, request)
        self.gate.advance(time)
        self.core.protected.protect_match(self.core.root_node, request)
        hint = LateHint(tenant, names.get("conversation"), time, return_in_s=5.0)
        self.core.conversations.apply_hint(hint)
        self.core.requests.report_end(req)
        self.tree.insert([*tokens, 3, 4], request, tenant)
        self.gate.finish(number, request)
        self.order.add(Prefill(len(tokens)), Vouched(tenant) if is_vouched else tenant)
        self.order.admit(self.order.in_order(1))
        req.retraction_count = 0
        self.observer.refuse(req, INVALID)

    def count_entries(self) -> dict[str, int]:
        return count_entries(self.core, self.gate, self.order, self.observer)


def fresh_names(*keys: str) -> Callable[[int], dict[str, str | None]]:
    """Return a function of a request's number: its names, of which those of ``keys`` are new each time."""

    def names_of(number: int) -> dict[str, str | None]:
        stable_names: dict[str, str | None] = {"tenant": "t", "conversation": f"c{number % 7}"}
        return {**stable_names, "category": "chat"} | {key: f"{key}-{number}" for key in keys}

    return names_of


def half_vouched(number: int) -> dict[str, str | None]:
    """Every name is new; a gateway vouches for every second tenant."""
    return {**all_fresh(number), "source": GATEWAY if number % 2 else CLIENT}


all_fresh = fresh_names("tenant", "conversation", "category")
NAMES_BY_CASE = {"vouched": half_vouched, "one tenant": fresh_names("conversation", "category")}
NAMES_BY_CASE |= {"everything": all_fresh}


def growth_of(case: str, first_count: int, last_count: int) -> dict[str, tuple[int, int]]:
    server = Server("wa")
    names_of = NAMES_BY_CASE[case]
    serve = lambda number: server.serve(**names_of(number))  # noqa: E731
    return grown_containers(server, serve, first_count, last_count, 0.1, SLACK_ENTRIES)


@pytest.mark.parametrize(
    "case", ["vouched", "one tenant", pytest.param("everything", marks=pytest.mark.long)]
)
def test_no_container_grows_with_new_names(case) -> None:
    assert growth_of(case, 1_300, 2_200) == {}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", ["everything", "vouched"])
def test_no_container_grows_with_100_000_new_names(case) -> None:
    assert growth_of(case, 5_000, 100_000) == {}
