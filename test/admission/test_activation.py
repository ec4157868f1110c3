"""Activation of the session gate: its conditions, and its effect on running sessions."""

import pytest

from sglang_canopy.admission.activation import Activation, GateSettings, Thrash
from sglang_canopy.admission.agents import Agents
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.admission.session import Session
from sglang_canopy.records import Request

CAPACITY_TOKENS = 100


class Client:
    """A session of ``tokens`` tokens, whose turns hit ``cached_fraction`` of their prompts."""

    def __init__(
        self, gate: SessionGate, name: str, tokens: int = 40, stop: str = "tool", **fields: str
    ) -> None:
        self.gate, self.name, self.stop, self.fields = gate, name, stop, fields
        self.path = tuple(hash((name, block)) for block in range(tokens // 10))
        self.turns = 0
        self.request: Request | None = None

    @property
    def ticket(self) -> str:
        return f"{self.name}/{self.turns}"

    @property
    def is_delayed(self) -> bool:
        return self.gate.holds(self.ticket)

    def send(self, time: float) -> None:
        self.turns += 1
        self.request = Request(
            time,
            path=self.path,
            block_tokens=10,
            prompt_tokens=10 * len(self.path),
            conversation=self.name,
            turn=self.turns,
            **self.fields,  # type: ignore[arg-type]
        )
        self.gate.arrive(self.ticket, self.request)

    def end(self, cached_fraction: float = 1.0) -> None:
        assert self.request is not None
        self.request.stop = self.stop
        self.request.cached_tokens = round(cached_fraction * self.request.prompt_tokens)
        self.gate.finish(self.ticket, self.request)

    def turn(self, time: float, cached_fraction: float = 1.0) -> None:
        self.send(time)
        assert not self.is_delayed
        self.end(cached_fraction)


def gate_that_thrashes(
    stop: str = "tool", pause_s: float = 1.0, category: str = "default", **settings: object
) -> tuple[SessionGate, list[Client]]:
    """Return a gate of 100 tokens and its clients, which have thrashed."""
    gate = SessionGate(GateSettings(**settings), CAPACITY_TOKENS)  # type: ignore[arg-type]
    return gate, thrash(gate, stop, pause_s, category)


def thrash(
    gate: SessionGate, stop: str = "tool", pause_s: float = 1.0, category: str = "default"
) -> list[Client]:
    """Let three sessions of 40 tokens recompute them in a gate of 100, for 20 times as long as they pause."""
    clients = [Client(gate, name, stop=stop, category=category) for name in "abc"]
    for _ in range(8):
        for client in clients:
            client.send(gate.now + pause_s if client is clients[0] else gate.now)
        gate.advance(gate.now + 20.0 * pause_s)
        for client in reversed(clients):
            client.end(cached_fraction=0.0)
        if gate.activation.is_active:
            break
    return clients


def pass_other_agents(gate: SessionGate, times: range) -> None:
    """Let an agent of one turn compute a new prompt at each time."""
    for time in times:
        agent = Client(gate, f"other {time}")
        agent.turn(float(time), cached_fraction=0.0)
        gate.hint_over(None, agent.name)


def test_thrashing_agents_are_delayed_and_the_youngest_is_paused() -> None:
    gate, (oldest, middle, youngest) = gate_that_thrashes()
    assert gate.stats()["active"]
    assert gate.stats()["paused_sessions"] == 1
    youngest.send(gate.now + 1.0)
    assert youngest.is_delayed
    for client in (oldest, middle):
        client.turn(gate.now + 1.0)
    newcomer = Client(gate, "new")
    newcomer.send(gate.now + 1.0)
    assert newcomer.is_delayed
    gate.hint_over(None, "a")
    gate.advance(gate.now + 1.0)
    assert (youngest.is_delayed, newcomer.is_delayed) == (False, True)  # the paused one is first


def test_equal_losses_of_chats_delay_no_session() -> None:
    gate, clients = gate_that_thrashes(stop="end", pause_s=30.0)
    for client in clients * 5:
        client.turn(gate.now + 10.0, cached_fraction=0.0)
    assert gate.stats()["times_activated"] == 0


@pytest.mark.parametrize(
    ("pause_s", "category"), [(1.0, "chat"), (15.0, "generate"), (100.0, "chat-tools-after-tool")]
)
def test_agents_are_recognised_without_a_parser_and_labels(pause_s: float, category: str) -> None:
    gate, (_, _, youngest) = gate_that_thrashes(stop="end", pause_s=pause_s, category=category)
    assert gate.stats()["active"]
    youngest.send(gate.now + 1.0)
    assert youngest.is_delayed


def test_a_paused_sessions_recomputation_is_no_loss() -> None:
    """If the recomputation after a pause counted as a loss, the gate could never show a gain."""
    gate, (oldest, _, youngest) = gate_that_thrashes()
    gate.hint_over(None, oldest.name)
    gate.advance(gate.now + 1.0)
    lost_before = gate.activation.thrash.lost_tokens
    youngest.turn(gate.now, cached_fraction=0.0)
    assert gate.activation.thrash.lost_tokens == lost_before


def test_a_return_is_learnt_when_its_request_arrives() -> None:
    """In a full queue most requests that have returned are not answered yet."""
    gate = SessionGate(GateSettings(), 100 * CAPACITY_TOKENS)
    clients = [Client(gate, str(number)) for number in range(100)]
    for client in clients:
        client.turn(0.0)
    for client in clients:
        client.send(5.0)
    assert gate.model.reuse_count == 100
    gate.model.fit(5.0)
    assert sum(sum(category.waiting) for category in gate.model.categories) == 0


def test_chats_are_not_delayed_while_agents_are() -> None:
    gate, _ = gate_that_thrashes()
    for number in range(20):
        chat = Client(gate, f"chat {number}", stop="end", category="chat")
        chat.send(gate.now)
        assert not chat.is_delayed
        chat.end()


def test_a_tenants_answers_classify_its_new_sessions() -> None:
    agents, gate = Agents(), SessionGate(GateSettings(), CAPACITY_TOKENS)
    category = gate.model.categories.root
    for number in range(8):
        for stop, tenant in (("end", "people"), ("tool", "robots")):
            session = Session(number, tenant, None, 0.0, category)
            agents.judge_answer(session, Request(0.0, stop=stop, tenant=tenant))
            agents.judge_silence(session, 30.0)
    for tenant, is_agent in (("people", False), ("robots", True)):
        newcomer = Session(99, tenant, None, 0.0, category)
        assert agents.recognise(newcomer, Request(0.0, tenant=tenant)) is is_agent


@pytest.mark.parametrize(("pause_s", "stop"), [(5, "tool"), (5, "end"), (60, "tool"), (60, "end")])
def test_an_agents_answer_is_recognised_once(pause_s: float, stop: str) -> None:
    """An agent is recognised by its tool call or by the tool's result, also if the tool was slow."""
    agents, gate = Agents(), SessionGate(GateSettings(), CAPACITY_TOKENS)
    session = Session(0, None, None, 0.0, gate.model.categories.root)
    for turn in range(3):
        session.last_contact_s = 100.0 * turn
        agents.judge_answer(session, Request(0.0, stop=stop))
        agents.judge_silence(session, session.last_contact_s + pause_s)
        result = Request(0.0, category="agent-after-tool")
        assert agents.judge_return(session, result, session.last_contact_s + pause_s)
        assert agents.agent_answers == turn + 1


def test_one_swift_reply_makes_no_agent_and_keeps_no_place() -> None:
    gate = SessionGate(GateSettings(), 100 * CAPACITY_TOKENS)
    persons = [Client(gate, f"person {number}", stop="end") for number in range(10)]
    for time in (0.0, 60.0, 120.0):
        for person in persons:
            person.turn(time)
    persons[0].turn(125.0)
    newcomer = Client(gate, "new person", stop="end")
    newcomer.turn(125.0)
    newcomer.turn(130.0)
    assert not any(session.is_agent for session in gate.places.active_sessions.values())
    gate._refresh()
    assert 0 < gate.stats()["footprint_tokens"] <= 40, "the new one is not known as a person yet"
    newcomer.turn(135.0)
    assert gate.session_index.by_conversation[None, newcomer.name].is_agent


def test_category_records_are_bounded() -> None:
    agents, gate = Agents(), SessionGate(GateSettings(), CAPACITY_TOKENS)
    for number in range(3000):
        session = Session(number, f"t{number}", None, 0.0, gate.model.categories.root)
        agents.judge_answer(session, Request(0.0, stop="tool", tenant=f"t{number}"))
    assert len(agents._shares) == 1024
    newcomer = Session(9999, "other", None, 0.0, gate.model.categories.root)
    assert agents.recognise(newcomer, Request(0.0, tenant="other"))  # by all tenants' record


@pytest.mark.parametrize(("names", "options"), [("ab", {"cached_fraction": 0.0}), ("abcd", {})])
def test_losses_of_sessions_that_fit_or_are_on_the_host_do_not_activate(names, options) -> None:
    """A cache that was flushed is no thrash: fewer sessions would not help."""
    gate = SessionGate(GateSettings(), CAPACITY_TOKENS)
    for time, client in enumerate([Client(gate, name) for name in names] * 5):
        client.turn(float(time), **options)
    assert gate.stats()["times_activated"] == 0


def test_a_paused_session_whose_request_is_aborted_keeps_its_age() -> None:
    gate, (oldest, _, youngest) = gate_that_thrashes()
    youngest.send(gate.now + 1.0)
    gate.leave(youngest.ticket)
    assert gate.stats()["paused_sessions"] == 1
    newcomer = Client(gate, "new")
    newcomer.send(gate.now + 1.0)
    youngest.send(gate.now + 1.0)
    gate.hint_over(None, oldest.name)
    gate.advance(gate.now + 1.0)
    assert (youngest.is_delayed, newcomer.is_delayed) == (False, True)


def test_a_deactivated_gate_admits_a_few_waiting_sessions_at_each_call(monkeypatch):
    monkeypatch.setattr("sglang_canopy.admission.gate._MAX_ENTERED_AT_ONCE", 3, raising=False)
    gate, _ = gate_that_thrashes()
    waiting = [Client(gate, f"new{number}") for number in range(10)]
    for client in waiting:
        client.send(gate.now)
    gate.activation._deactivate()
    delayed_names = []
    for step in range(5):
        gate.advance(gate.now + step)
        delayed_names.append([client.name for client in waiting if client.is_delayed])
    assert not gate.stats()["active"]
    all_names = [client.name for client in waiting]
    assert delayed_names == [all_names[3:], all_names[6:], all_names[9:], [], []]
    late_client = Client(gate, "late")
    late_client.send(gate.now + 1.0)
    assert not late_client.is_delayed


def test_the_gate_deactivates_after_a_while_without_waiting() -> None:
    gate, clients = gate_that_thrashes()
    for client in clients:
        gate.hint_over(None, client.name)
    pass_other_agents(gate, range(200, 700, 130))
    assert not gate.stats()["active"]


def end_turn(
    activation: Activation, after_s: float, has_waiting: bool = False, exceeds_capacity: bool = True
) -> None:
    activation.advance(activation._now + after_s, has_waiting, is_busy=True)
    activation.record_turn(100, exceeds_capacity)


def activation_of(turns_per_s: float, pause_s: float, lost_fraction: float = 0.9) -> Activation:
    """Return the state after turns at ``turns_per_s`` without the gate; they recomputed ``lost_fraction``."""
    activation = Activation(CAPACITY_TOKENS, quiet_s=120.0)
    for _ in range(40):
        activation.record_pause(pause_s)
        activation.thrash.record_prompt(round(lost_fraction * CAPACITY_TOKENS), CAPACITY_TOKENS)
        end_turn(activation, 1.0 / turns_per_s)
    return activation


@pytest.mark.parametrize(
    ("turns_per_s", "pause_s", "lost_fraction", "activates"),
    [
        (0.1, 10.0, 0.9, True),
        (0.1, 100.0, 0.9, False),
        (1.0, 2.0, 0.9, True),
        (1.0, 3.0, 0.9, False),
        (5.0, 1.0, 0.9, False),
        (0.1, 1.0, 0.3, False),  # little is recomputed
    ],
)
def test_it_activates_only_if_few_sessions_without_recomputation_are_faster(
    turns_per_s, pause_s, lost_fraction, activates
) -> None:
    """Eight sessions that fit can end at most 8 / ``pause_s`` turns a second."""
    assert activation_of(turns_per_s, pause_s, lost_fraction).may_activate(500.0, 8.0) is activates


def test_idle_time_does_not_count_as_slow_service() -> None:
    activation = activation_of(5.0, 1.0)
    for _ in range(10):
        activation.advance(activation._now + 3600.0, has_waiting=False, is_busy=False)
        end_turn(activation, 0.2)
    assert not activation.may_activate(activation._now, 8.0)


def run_trial(activation: Activation, turns_per_s: float, turn_count: int) -> float:
    """Activate while sessions wait and turns end at ``turns_per_s``; return the seconds until it is inactive."""
    activation.activate()
    start_s = activation._now
    for _ in range(turn_count):
        if not activation.is_active:
            break
        end_turn(activation, 1.0 / turns_per_s, has_waiting=True, exceeds_capacity=False)
    return activation._now - start_s


def test_turns_per_second_decide_whether_it_stays_active() -> None:
    activation = activation_of(0.1, 1.0)
    assert activation.may_activate(500.0, 8.0)
    run_trial(activation, 0.2, 500)
    assert activation.is_active
    for turns_per_s in (0.02, 0.09, 0.11):  # equal within the uncertainty is no gain
        activation = activation_of(0.1, 1.0)
        assert activation.may_activate(500.0, 8.0)
        trial_s = run_trial(activation, turns_per_s, 500)
        assert activation.ineffective_activations == 1
        assert trial_s < 500.0, "32 turns took 320 s without the gate"
        end_s = activation._now
        for _ in range(40):
            activation.thrash.record_prompt(90, CAPACITY_TOKENS)
            end_turn(activation, 10.0)
        assert not activation.may_activate(end_s + 25 * trial_s, 8.0)
        assert activation.may_activate(end_s + 34 * trial_s, 8.0)


def test_turns_of_sessions_that_do_not_fit_are_no_part_of_the_trial() -> None:
    """Sessions that do not fit are answered first."""
    activation = activation_of(0.1, 1.0)
    assert activation.may_activate(500.0, 8.0)
    activation.activate()
    for _ in range(100):
        end_turn(activation, 20.0, has_waiting=True)
    assert activation.is_active


def test_time_in_which_no_session_waits_is_no_part_of_the_trial() -> None:
    activation = activation_of(0.1, 1.0)
    assert activation.may_activate(500.0, 8.0)
    activation.activate()
    end_turn(activation, 1.0, has_waiting=True, exceeds_capacity=False)
    for _ in range(100):
        activation.advance(activation._now, has_waiting=False, is_busy=True)
        activation.advance(activation._now + 50.0, has_waiting=True, is_busy=True)
        end_turn(activation, 5.0, has_waiting=True, exceeds_capacity=False)
    assert activation.is_active
    assert activation.ineffective_activations == 0


def test_paused_and_remembered_sessions_are_bounded_by_tenant() -> None:
    gate, _ = gate_that_thrashes(max_paused=4)
    for number in range(50):
        client = Client(gate, f"x{number}", tenant="busy")
        client.send(gate.now + 1.0)
        if not client.is_delayed:
            client.end(cached_fraction=0.0)
    assert gate.stats()["paused_sessions"] <= 4


@pytest.mark.parametrize("prompt_tokens", [1, 7, 1000])
def test_the_window_of_thrash_is_a_capacity_in_few_parts(prompt_tokens: int) -> None:
    thrash = Thrash(1000)
    for _ in range(5000):
        thrash.record_prompt(0, prompt_tokens)
    for _ in range(5000):
        thrash.record_prompt(prompt_tokens, prompt_tokens)
    assert thrash.lost_share == 1.0
    assert 1000 <= thrash.computed_tokens <= 1000 + 2 * max(prompt_tokens, 1000 // 64 + 1)
    assert len(thrash._parts) <= 66
