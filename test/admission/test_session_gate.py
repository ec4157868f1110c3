"""The session gate alone: admitted sessions, their order, and released places."""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.records import Request

BLOCK_TOKENS = 10
_new_blocks = itertools.count(1)


class Agent:
    """A session that grows by ``growth_tokens`` a turn and begins with ``shared_blocks``."""

    def __init__(
        self,
        name: str | None,
        tokens: int,
        growth_tokens: int = 0,
        tenant: str | None = None,
        shared_blocks: tuple[int, ...] = (),
    ) -> None:
        self.name, self.tokens, self.tenant = name, tokens, tenant
        self.growth_tokens = growth_tokens
        self.path = list(shared_blocks)
        self.turns = 0
        self._extend()

    def _extend(self) -> None:
        missing_blocks = self.tokens // BLOCK_TOKENS - len(self.path)
        self.path += itertools.islice(_new_blocks, max(0, missing_blocks))

    def request(self, time: float) -> Request:
        self.turns += 1
        return Request(
            time=time,
            path=tuple(self.path),
            block_tokens=BLOCK_TOKENS,
            prompt_tokens=self.tokens,
            conversation=self.name,
            tenant=self.tenant,
            turn=self.turns,
            stop="tool",
        )

    def grow(self) -> None:
        self.tokens += self.growth_tokens
        self._extend()


def gate_of(capacity_tokens: int, **options: float) -> SessionGate:
    return SessionGate(GateSettings(always=True, **options), capacity_tokens)  # type: ignore[arg-type]


def arrive(gate: SessionGate, agent: Agent, time: float) -> tuple[str, Request]:
    """Send the agent's next turn, and return its ticket and request."""
    request = agent.request(time)
    ticket = f"{agent.tenant}/{agent.name or id(agent)}/{agent.turns}"
    gate.arrive(ticket, request)
    return ticket, request


def serve_turn(gate: SessionGate, agent: Agent, time: float) -> bool:
    """Serve a turn at once; return whether it was admitted."""
    ticket, request = arrive(gate, agent, time)
    if gate.holds(ticket):
        gate.leave(ticket)
        return False
    gate.finish(ticket, request)
    agent.grow()
    return True


@pytest.fixture
def gate():
    return gate_of(100)


def test_new_sessions_wait_while_thinking_sessions_fill_the_memory(gate) -> None:
    assert serve_turn(gate, Agent("a", 50), 0.0)
    assert serve_turn(gate, Agent("b", 50), 1.0)
    ticket, _ = arrive(gate, Agent("c", 10), 2.0)
    assert gate.holds(ticket)
    assert gate.stats()["waiting_sessions"] == 1
    gate.hint_over(None, "a")
    gate.advance(2.0)
    assert not gate.holds(ticket)


def test_the_pause_after_an_overtaken_request_is_learnt(gate) -> None:
    agent = Agent("a", 50, growth_tokens=10)
    ticket, request = arrive(gate, agent, 0.0)
    request.time = 3.0  # its arrival counts as that of the requests that overtook it
    gate.advance(5.0)
    gate.finish(ticket, request)
    agent.grow()
    assert serve_turn(gate, agent, 9.0)
    assert gate.model.reuse_count == 1


def test_a_turn_of_an_admitted_session_never_waits(gate) -> None:
    agent = Agent("a", 60, growth_tokens=60)
    for time in range(5):
        assert serve_turn(gate, agent, float(time))
    assert gate.stats()["footprint_tokens"] > 100


def test_a_session_without_a_name_is_recognised_by_its_prompt(gate) -> None:
    agent = Agent(None, 60, growth_tokens=20)
    assert serve_turn(gate, agent, 0.0)
    ticket, _ = arrive(gate, Agent(None, 60), 1.0)
    assert gate.holds(ticket)
    assert serve_turn(gate, agent, 2.0), "it continues an admitted session"


def test_prompts_with_a_common_beginning_are_separate_sessions(gate) -> None:
    system = tuple(itertools.islice(_new_blocks, 2))
    first, second = Agent(None, 60, shared_blocks=system), Agent(None, 80, shared_blocks=system)
    assert serve_turn(gate, first, 0.0)
    ticket, _ = arrive(gate, second, 1.0)
    assert gate.holds(ticket)


def test_a_shared_prefix_counts_once() -> None:
    system = tuple(itertools.islice(_new_blocks, 5))
    gate = gate_of(100)
    for name in "abcde":
        assert serve_turn(gate, Agent(name, 60, shared_blocks=system), 0.0), name
    assert gate.stats()["footprint_tokens"] == 50 + 5 * 10
    assert not serve_turn(gate, Agent("f", 60, shared_blocks=system), 0.0)


def test_parallel_requests_of_one_conversation_are_sessions_of_their_own(gate) -> None:
    """A client that names all its requests alike gets no more memory than others."""
    arrive(gate, Agent("same", 40), 0.0)
    for i in range(3):
        gate.arrive(f"parallel {i}", Agent("same", 40).request(1.0))
    assert [gate.holds(f"parallel {i}") for i in range(3)] == [False, True, True]


def test_a_session_that_never_returns_loses_its_place(gate) -> None:
    assert serve_turn(gate, Agent("a", 100), 0.0)
    ticket, _ = arrive(gate, Agent("b", 100), 1.0)
    assert gate.holds(ticket)
    for time in range(2, 1000):
        gate.advance(float(time))
        if not gate.holds(ticket):
            break
    assert not gate.holds(ticket)
    assert time <= gate.settings.horizon_s + 2


def test_learnt_curves_decide_how_long_a_silent_session_counts() -> None:
    """After turns within two seconds of each other, ten seconds of silence end a session."""
    gate = gate_of(1000)
    for number in range(60):
        agent = Agent(f"fast {number}", 10)
        for i in range(4):
            assert serve_turn(gate, agent, 10.0 * number + i)
        gate.hint_over(None, f"fast {number}")
    assert serve_turn(gate, Agent("silent", 900), 700.0)
    ticket, _ = arrive(gate, Agent("new", 900), 700.5)
    assert gate.holds(ticket)
    gate.advance(760.0)
    assert not gate.holds(ticket)


def test_a_thinking_session_is_charged_before_any_session_has_returned() -> None:
    """Once eight sessions have been silent for the horizon, requests of one turn are not charged for long."""
    gate = gate_of(1000)
    for number in range(9):
        assert serve_turn(gate, Agent(f"first {number}", 100), 0.5 * number)
        assert gate.stats()["footprint_tokens"] == 100 * (number + 1)
    gate.model.fit(100.0)
    gate._refresh()
    assert gate.stats()["footprint_tokens"] == 900
    for category in gate.model.categories:
        assert sum(category.all_events) == 0
    gate.model.fit(300.0)
    assert serve_turn(gate, Agent("one more", 100), 301.0)
    assert gate.stats()["footprint_tokens"] == 0


def test_a_paused_session_that_returns_waits_and_is_paused_no_more(gate) -> None:
    """If it stayed among the paused, their bound could drop it, and nothing would admit its request."""
    agent = Agent("a", 60)
    assert serve_turn(gate, agent, 0.0)
    (session,) = gate.places.active_sessions.values()
    gate.places.pause(session, 1.0)
    arrive(gate, Agent("b", 90), 1.0)
    ticket, _ = arrive(gate, agent, 2.0)
    assert gate.holds(ticket)
    assert gate.stats()["paused_sessions"] == 0


def test_an_aged_session_is_admitted_before_smaller_new_ones() -> None:
    gate = gate_of(100, age_s=30.0)
    for name in "ab":
        arrive(gate, Agent(name, 45), 0.0)
    large_ticket, _ = arrive(gate, Agent("large", 80), 1.0)
    small_ticket, _ = arrive(gate, Agent("small", 10), 2.0)
    assert gate.holds(large_ticket)
    assert not gate.holds(small_ticket), "it uses room that the large session cannot use"
    later_ticket, _ = arrive(gate, Agent("later", 10), 40.0)
    gate.leave("None/a/1")
    gate.advance(41.0)
    assert gate.holds(large_ticket)
    assert gate.holds(later_ticket), "free room is kept for the aged session"
    gate.leave("None/b/1")
    gate.leave(small_ticket)
    gate.advance(42.0)
    assert not gate.holds(large_ticket)


def test_one_session_at_a_time_starts_without_room_the_oldest_first() -> None:
    gate = gate_of(100, age_s=10.0, overrun_interval_s=50.0)
    arrive(gate, Agent("never ends", 100), 0.0)
    tickets = [arrive(gate, Agent(f"n{i}", 100), 1.0)[0] for i in range(5)]
    admitted_counts = []
    for time in range(2, 1 + 50 * 5 + 1):
        gate.advance(float(time))
        admitted_counts.append([*map(gate.holds, tickets)].count(False))
    assert not any(map(gate.holds, tickets)), "session n is admitted after n intervals"
    assert admitted_counts == [(time - 1) // 50 for time in range(2, 252)]


def test_a_session_larger_than_the_memory_is_admitted_alone(gate) -> None:
    ticket, _ = arrive(gate, Agent("huge", 500), 0.0)
    assert not gate.holds(ticket)


def admissions_in_order(gate: SessionGate, tickets: list[str]) -> Iterator[str]:
    """End one session after the other; yield the ticket of each that is admitted."""
    active = [ticket for ticket in tickets if not gate.holds(ticket)]
    waiting = [ticket for ticket in tickets if gate.holds(ticket)]
    while waiting:
        gate.leave(active.pop(0))
        gate.advance(gate.now)
        for ticket in [ticket for ticket in waiting if not gate.holds(ticket)]:
            waiting.remove(ticket)
            active.append(ticket)
            yield ticket


def test_many_sessions_of_a_tenant_delay_that_tenant(gate) -> None:
    first_ticket, _ = arrive(gate, Agent("first", 25, tenant="steady"), 0.0)
    busy_tickets = [arrive(gate, Agent(f"f{i}", 25, tenant="busy"), 0.1)[0] for i in range(50)]
    second_ticket, _ = arrive(gate, Agent("second", 25, tenant="steady"), 0.2)
    assert list(admissions_in_order(gate, [*busy_tickets, second_ticket])).index(second_ticket) <= 1
    assert not gate.holds(first_ticket)


def test_invented_tenants_have_one_share_together(gate) -> None:
    arrive(gate, Agent("first", 25, tenant="steady"), 0.0)
    invented_tickets = [arrive(gate, Agent("x", 25, tenant=f"t{i}"), 0.1)[0] for i in range(50)]
    steady_tickets = [arrive(gate, Agent(f"m{i}", 25, tenant="steady"), 0.2)[0] for i in range(5)]
    in_order = list(admissions_in_order(gate, [*invented_tickets, *steady_tickets]))
    assert max(in_order.index(ticket) for ticket in steady_tickets) <= 2 * len(steady_tickets)


def test_a_tenant_above_its_share_makes_room_for_an_aged_session_of_another() -> None:
    gate = gate_of(100, age_s=10.0)
    large_sessions = [Agent(f"h{i}", 20, tenant="large") for i in range(5)]
    for agent in large_sessions:
        assert serve_turn(gate, agent, 0.0)
    ticket, _ = arrive(gate, Agent("steady", 20, tenant="steady"), 1.0)
    time = 1.0
    while gate.holds(ticket) and time < 100.0:
        time += 1.0
        for agent in large_sessions:
            if time % 5 == 0:
                serve_turn(gate, agent, time)  # they never end
        gate.advance(time)
    assert not gate.holds(ticket)
    assert time <= 20.0
    assert gate.stats()["pauses"] == 1


def test_room_is_made_only_from_what_a_tenant_has_above_its_share() -> None:
    """Pausing the session of 70 would leave its tenant 20 of its share of 50."""
    gate = gate_of(100, age_s=5.0, overrun_interval_s=1e9)
    for number, tokens in enumerate((20, 70)):
        assert serve_turn(gate, Agent(f"b{number}", tokens, tenant="b"), float(number))
    ticket, _ = arrive(gate, Agent("a", 40, tenant="a"), 2.0)
    assert gate.holds(ticket)
    gate.advance(20.0)
    assert gate.footprints.tenant_charges["b"] >= 50


def test_a_conversation_that_ends_during_its_request_leaves_with_the_answer(gate) -> None:
    ticket, request = arrive(gate, Agent("a", 90), 0.0)
    gate.hint_over(None, "a")
    assert gate.stats()["active_sessions"] == 1
    gate.finish(ticket, request)
    assert gate.stats()["active_sessions"] == 0
    assert serve_turn(gate, Agent("b", 90), 1.0)


def test_session_records_are_bounded() -> None:
    gate = gate_of(10_000, max_sessions=50)
    assert serve_turn(gate, Agent("steady", 10, tenant="steady"), 0.0)
    for i in range(300):
        assert serve_turn(gate, Agent(f"x{i}", 10, tenant="busy"), 0.1)
    stats = gate.stats()
    assert stats["active_sessions"] == 50
    assert stats["forgotten_sessions"] == 251
    assert ("steady", "steady") in gate.session_index.by_conversation


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["new", "new", "return", "finish", "finish", "leave", "over"]),
        st.integers(0, 30),
        st.integers(1, 60),
        st.sampled_from([None, "t1", "t2"]),
        st.floats(0.0, 20.0),
    ),
    max_size=120,
)


class RandomClients:
    """Clients and a server that cause the gate's events, and an independent recount of its sums."""

    def __init__(self, always: bool = True) -> None:
        settings = GateSettings(always=always, age_s=20, overrun_interval_s=200, max_sessions=1000)
        self.gate = SessionGate(settings, 200)
        self.agents: list[Agent] = []
        self.open_requests: dict[str, tuple[Agent, Request]] = {}
        self.time = 0.0
        self.log: list[tuple[str, bool]] = []

    def run_events(self, events: list) -> None:
        for event in events:
            counts_before = self.gate.counts.admitted_sessions, self.gate._last_overrun_s
            self.act(*event)
            self.gate.advance(self.time)
            self.log += [(ticket, self.gate.holds(ticket)) for ticket in self.open_requests]
            self.check(*counts_before)

    def act(self, event: str, choice: int, tokens: int, tenant: str | None, pause_s: float) -> None:
        self.time += pause_s
        tickets = list(self.open_requests)
        busy_ids = {id(agent) for agent, _ in self.open_requests.values()}
        idle = [agent for agent in self.agents if id(agent) not in busy_ids]
        if event == "new" or (event == "return" and not idle):
            agent = Agent(f"s{len(self.agents)}", tokens, growth_tokens=tokens // 4, tenant=tenant)
            self.agents.append(agent)
            self.send(agent)
        elif event == "return":
            self.send(idle[choice % len(idle)])
        elif event == "over":
            if self.agents:
                agent = self.agents[choice % len(self.agents)]
                self.gate.hint_over(agent.tenant, agent.name)
        elif tickets:
            ticket = tickets[choice % len(tickets)]
            is_delayed = self.gate.holds(ticket)
            agent, request = self.open_requests[ticket]
            if event == "finish" and not is_delayed:
                request.cached_tokens = request.prompt_tokens * (choice % 4) // 4
                self.gate.finish(ticket, request)
                agent.grow()
            elif event == "leave":
                self.gate.leave(ticket)
            else:
                return
            del self.open_requests[ticket]

    def send(self, agent: Agent) -> None:
        request = agent.request(self.time)
        ticket = f"{agent.name}/{agent.turns}"
        self.gate.arrive(ticket, request)
        self.open_requests[ticket] = agent, request

    def check(self, admitted_before: int, overrun_before_s: float) -> None:
        gate = self.gate
        active = list(gate.places.active_sessions.values())
        charged_tokens = sum(session.charged_tokens for session in active)
        assert gate.footprints.charged_tokens == pytest.approx(charged_tokens, abs=1e-6)
        uses = Counter(block for session in active for block in session.blocks)
        counted_uses = {block: count for block, (count, _) in gate.footprints._uses.items()}
        assert uses == Counter(counted_uses)
        tenant_charges = Counter[str | None]()
        for session in active:
            tenant_charges[session.tenant] += session.charged_tokens  # type: ignore[assignment]
        charges = {tenant: tokens for tenant, tokens in tenant_charges.items() if tokens > 1e-6}
        kept_charges = {t: n for t, n in gate.footprints.tenant_charges.items() if n > 1e-6}
        assert kept_charges == pytest.approx(charges)
        assert gate.footprints.shared_blocks == sum(count > 1 for count in uses.values())
        assert gate.places.active_counts == Counter(session.tenant for session in active)
        assert set(gate.requests) == set(self.open_requests)
        paused = gate.places.paused_sessions
        assert not {session.number for session in active} & {*gate.waiting.sessions, *paused}
        assert not set(gate.waiting.sessions) & set(paused)
        assert all(s.has_answer and not s.has_request and not s.blocks for s in paused.values())
        known_sessions = {*gate.waiting.sessions.values(), *active, *paused.values()}
        open_sessions = {session for session, _ in gate.requests.values()}
        assert {session for session in known_sessions if session.has_request} == open_sessions
        assert {*gate.session_index.by_conversation.values()} <= known_sessions
        if not gate.activation.is_active:
            assert not gate.waiting
        must_fit = gate.settings.always and gate._last_overrun_s == overrun_before_s
        if must_fit and gate.counts.admitted_sessions > admitted_before and len(active) > 1:
            assert gate.footprints.total_tokens <= gate.places.capacity_tokens + 1e-6


@given(EVENTS, st.booleans())
def test_sums_equal_a_recount_and_admitted_sessions_fit(events: list, always: bool) -> None:
    RandomClients(always).run_events(events)


@given(EVENTS, st.booleans())
def test_no_session_is_delayed_longer_than_its_position_times_the_limit(events, always):
    """This holds even if no request ever ends."""
    clients = RandomClients(always)
    clients.run_events(events)
    limit_s = clients.gate.settings.overrun_interval_s
    delayed_count = sum(clients.gate.holds(ticket) for ticket in clients.open_requests)
    start_s = clients.time
    step_s = 5.0
    while clients.time < start_s + (limit_s + 2 * step_s) * (delayed_count + 1):
        clients.time += step_s
        clients.gate.advance(clients.time)
    assert not any(clients.gate.holds(ticket) for ticket in clients.open_requests)


@settings(max_examples=20)
@given(EVENTS)
def test_without_pressure_no_session_waits(events: list) -> None:
    clients = RandomClients()
    clients.gate = SessionGate(GateSettings(always=True), 1_000_000)
    clients.run_events(events)
    assert not any(is_delayed for _, is_delayed in clients.log)
    assert clients.gate.stats()["delayed_sessions"] == 0
