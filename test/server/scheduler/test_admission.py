"""The owner of a scheduler's queue, with the session gate."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.radix.live_request import LiveRequest, RequestPhase
from sglang_canopy.schedule.arranged import ArrangedQueue
from sglang_canopy.server.scheduler.admission import Admission, take_times
from sglang_canopy.wire.request_state import RequestState


class Req:
    """The part of SGLang's ``Req`` that the gate reads."""

    def __init__(self, rid: str, session: str, tokens: int, time_s: float) -> None:
        self.rid = rid
        self.to_finish = None
        request = LiveRequest(
            time=time_s,
            path=tuple(hash((session, i)) for i in range(tokens // 10)),
            block_tokens=10,
            prompt_tokens=tokens,
            conversation=session,
        )
        self.canopy = RequestState({}, request)
        self._finished = False

    def finished(self) -> bool:
        return self._finished

    def end(self, is_done: bool = True, cached_share: float = 0.0) -> None:
        """Answer with a tool call, or refuse; ``cached_share`` of the prompt was cached."""
        request = self.canopy.request
        request.stop = "tool"
        request.cached_tokens = round(cached_share * request.prompt_tokens)
        request.phase = RequestPhase.DONE if is_done else RequestPhase.REFUSED
        self._finished = True


class Scheduler:
    """A scheduler's queue and batches; a batch takes all that the gate offers."""

    def __init__(
        self, capacity_tokens: int = 100, is_always_on: bool = True, reports_aborts: bool = True
    ) -> None:
        self.gate = SessionGate(GateSettings(always=is_always_on), capacity_tokens)
        no_order = SimpleNamespace(requests=list)
        order = SimpleNamespace(is_on=False, arranged=no_order, protect=lambda _: None)
        self.admission = Admission(order, self.gate)  # type: ignore[arg-type]
        self.tree_cache = SimpleNamespace(admission=self.admission)
        self.waiting_queue: list[Req] = []
        self.running_batch = SimpleNamespace(reqs=[])
        self.last_batch = None
        self.chunked_req = None
        if reports_aborts:  # as releases since 0.5.23, though not of all requests
            self.send_abort_output = lambda: None

    def add(self, req: Req) -> None:
        self.admission.enqueue(self, req)
        self.waiting_queue.append(req)

    def offer(self) -> list[str]:
        """Return the requests that the next batch may take, and take none."""
        return self.step(batch_size=0)

    def step(self, batch_size: int = 1000) -> list[str]:
        """Take up to ``batch_size`` requests; return all that were offered."""
        offered: list[str] = []

        def choose() -> tuple[Any, None]:
            offered.extend(req.rid for req in self.waiting_queue)
            admitted = self.waiting_queue[:batch_size]
            self.waiting_queue = self.waiting_queue[batch_size:]
            self.running_batch.reqs += admitted
            return SimpleNamespace(reqs=admitted), None

        self.admission.choose(self, self.running_batch, choose)
        return offered

    def choose_nothing(self, join_queue: Any) -> None:
        """Call ``join_queue`` while SGLang chooses from its queue."""
        self.admission.choose(self, None, lambda: join_queue() or (None, None))

    def end(self, rid: str) -> None:
        ended_reqs = [req for req in self.running_batch.reqs if req.rid == rid]
        for req in ended_reqs:
            req.end()
        self.running_batch.reqs = [req for req in self.running_batch.reqs if req not in ended_reqs]
        self.admission.record_batch(SimpleNamespace(reqs=ended_reqs))

    @property
    def queue(self) -> list[str]:
        return [req.rid for req in self.waiting_queue]


@pytest.fixture
def scheduler():
    return Scheduler()


def test_delayed_requests_are_not_offered_and_keep_their_positions(scheduler) -> None:
    for i, tokens in enumerate((90, 90, 10, 90)):
        scheduler.add(Req(f"r{i}", f"s{i}", tokens, float(i)))
    assert scheduler.offer() == ["r0", "r2"]
    assert scheduler.queue == ["r0", "r1", "r2", "r3"]
    assert scheduler.step(batch_size=1) == ["r0", "r2"]
    assert scheduler.queue == ["r1", "r2", "r3"]


def test_samples_of_an_admitted_request_are_not_delayed(scheduler) -> None:
    """n = 4: SGLang answers a warm-up, then sends four copies while others wait for memory."""
    gate = scheduler.gate
    scheduler.add(Req("turn 1", "agent", 60, 0.0))
    scheduler.step()
    scheduler.end("turn 1")
    samples_before = gate.model.reuse_count
    scheduler.add(warm_up := Req("warm-up", "agent", 70, 1.0))
    warm_up.canopy.request.pending_samples = 4
    scheduler.add(Req("other", "other", 60, 1.5))
    assert scheduler.step() == ["warm-up"]
    scheduler.end("warm-up")
    for number in range(4):
        sample = Req(f"sample {number}", "agent", 70, 1.0)
        sample.canopy.request.warm_up = warm_up.canopy.request
        assert scheduler.add(sample) is None
    assert scheduler.step() == [f"sample {number}" for number in range(4)]
    for number in range(4):
        assert scheduler.queue == ["other"]
        assert scheduler.offer() == []
        scheduler.end(f"sample {number}")
    scheduler.offer()
    assert gate.model.reuse_count == samples_before + 1
    assert gate.stats()["delayed_sessions"] == 0


def test_samples_have_the_seniority_of_their_session(scheduler) -> None:
    """A sample carries no session of its own: its warm-up request has it."""
    for i in range(3):
        scheduler.add(Req(f"r{i}", f"s{i}", 30, float(i)))
    scheduler.step()
    for i in range(3):
        scheduler.end(f"r{i}")
    scheduler.add(warm_up := Req("warm-up", "s1", 30, 5.0))
    scheduler.step()
    scheduler.end("warm-up")
    for name, session in (("young", "s2"), ("sample", "s1"), ("old", "s0")):
        req = Req(name, session, 30, 6.0)
        if name == "sample":
            req.canopy.request.warm_up = warm_up.canopy.request
        scheduler.add(req)
    scheduler.add(Req("new", "s9", 90, 7.0))
    assert scheduler.offer() == ["old", "sample", "young"]


def test_the_oldest_session_comes_first_while_others_wait(scheduler) -> None:
    for i in range(3):
        scheduler.add(Req(f"r{i}", f"s{i}", 30, float(i)))
    assert len(scheduler.step()) == 3
    for i in range(3):
        scheduler.end(f"r{i}")
    scheduler.add(Req("young", "s2", 30, 5.0))
    scheduler.add(Req("old", "s0", 30, 6.0))
    assert scheduler.offer() == ["young", "old"], "no request waits: the queue is unchanged"
    scheduler.add(Req("new", "s9", 90, 7.0))
    assert scheduler.offer() == ["old", "young"]
    assert scheduler.queue == ["young", "old", "new"]


def test_an_inactive_gate_leaves_the_scheduler_its_own_queue() -> None:
    scheduler = Scheduler(is_always_on=False)
    for i in range(5):
        scheduler.add(Req(f"r{i}", f"s{i}", 90, float(i)))
    sglangs_queue = scheduler.waiting_queue
    offered: list[Any] = []
    scheduler.choose_nothing(lambda: offered.append(scheduler.waiting_queue))
    assert offered[0] is sglangs_queue


def test_a_session_that_is_paused_waits_in_sglangs_queue_until_the_rest_fits() -> None:
    scheduler = Scheduler(is_always_on=False)
    for turn in range(8):  # agents that recompute for longer than they pause
        now_s = 20.0 * turn
        for i in range(3):
            scheduler.add(Req(f"r{i}{turn}", f"s{i}", 40, now_s))
        scheduler.step()
        take_times(scheduler, [repr(now_s + 19.0)])
        for i in (2, 1, 0):
            scheduler.end(f"r{i}{turn}")
        if scheduler.gate.activation.is_active:
            break
    assert scheduler.gate.stats()["pauses"] == 1
    scheduler.add(Req("paused", "s2", 40, now_s + 20.0))
    scheduler.add(Req("under way", "s0", 40, now_s + 20.0))
    assert scheduler.offer() == ["under way"]
    assert scheduler.queue == ["paused", "under way"]
    scheduler.gate.hint_over(None, "s1")
    assert scheduler.offer() == ["under way", "paused"]


def test_requests_that_left_sglangs_queue_are_dropped(scheduler) -> None:
    scheduler.add(Req("r0", "s0", 90, 0.0))
    scheduler.step()
    scheduler.add(Req("r1", "s1", 90, 1.0))
    scheduler.add(Req("r2", "s2", 90, 2.0))
    assert scheduler.offer() == []
    scheduler.waiting_queue.pop(0)  # as an abort or a time limit does
    scheduler.running_batch.reqs[0].end(is_done=False)
    scheduler.running_batch.reqs = []
    assert scheduler.offer() == ["r2"]
    assert scheduler.gate.stats()["active_sessions"] == 1


def test_a_reused_name_is_another_request(scheduler) -> None:
    """Clients choose names: the first request of this name still runs when the second arrives."""
    scheduler.add(Req("job", "s0", 90, 0.0))
    scheduler.step()
    scheduler.add(Req("job", "s1", 90, 1.0))
    assert scheduler.offer() == []
    scheduler.waiting_queue.pop()  # its client disconnects
    take_times(scheduler, ["1.0"])
    assert scheduler.gate.stats()["active_sessions"] == 1
    assert not scheduler.gate.waiting


def test_arrivals_during_a_choice_displace_no_request(scheduler) -> None:
    """SGLang's grammars become ready there, with requests that join the queue."""
    scheduler.add(Req("r0", "s0", 90, 0.0))
    scheduler.step()
    scheduler.add(Req("waiting", "s1", 90, 1.0))
    late = Req("late", "s2", 90, 2.0)
    scheduler.choose_nothing(lambda: scheduler.add(late))
    assert scheduler.queue == ["waiting", "late"]
    assert scheduler.offer() == []


def test_errors_and_health_checks_are_never_delayed(scheduler) -> None:
    scheduler.add(Req("r0", "s0", 100, 0.0))
    failed_req = Req("r1", "s1", 100, 1.0)
    failed_req.to_finish = object()  # type: ignore[assignment]
    scheduler.add(failed_req)
    health_check = Req("r2", "s2", 100, 2.0)
    health_check.canopy.request.is_health_probe = True
    scheduler.add(health_check)
    assert len(scheduler.offer()) == 3


def test_sessions_expire_by_the_schedulers_time(scheduler) -> None:
    scheduler.add(Req("r0", "s0", 90, 0.0))
    scheduler.step()
    scheduler.end("r0")
    scheduler.add(Req("r1", "s1", 90, 1.0))
    assert scheduler.offer() == []
    assert take_times(scheduler, ["nan", "not a time", "-5"])
    assert scheduler.offer() == []
    assert take_times(scheduler, ["200.0"])
    assert scheduler.offer() == ["r1"]


RANDOM_EVENTS = ["new", "return", "return", "step", "step", "end", "end", "abort", "time"]


@pytest.mark.parametrize("is_always_on", [True, False])
def test_two_ranks_with_equal_inputs_decide_the_same(is_always_on: bool, monkeypatch) -> None:
    monkeypatch.setattr("sglang_canopy.admission.activation._MIN_GAIN", 0.1)  # it activates
    ranks = Scheduler(is_always_on=is_always_on), Scheduler(is_always_on=is_always_on)
    offers_by_rank: list[list[Any]] = [[], []]
    for scheduler, offers in zip(ranks, offers_by_rank, strict=True):
        rng = random.Random(7)
        time_s, sent_requests = 0.0, 0
        for _ in range(1000):
            time_s += rng.uniform(0.0, 1.0)
            event = rng.choice(RANDOM_EVENTS)
            if event in ("new", "return"):
                session_number = 100 + sent_requests if event == "new" else rng.randrange(8)
                session = f"s{session_number}"
                sent_requests += 1
                scheduler.add(Req(f"r{sent_requests}", session, rng.randrange(10, 60), time_s))
            elif event == "step":
                offers.append(scheduler.step(rng.randrange(3)))
            elif event == "end" and scheduler.running_batch.reqs:
                scheduler.end(rng.choice(scheduler.running_batch.reqs).rid)
            elif event == "abort" and scheduler.waiting_queue:
                scheduler.waiting_queue.pop(rng.randrange(len(scheduler.waiting_queue)))
            elif event == "time":
                take_times(scheduler, [repr(time_s)])
    assert offers_by_rank[0] == offers_by_rank[1]
    assert ranks[0].gate.counts == ranks[1].gate.counts
    assert ranks[0].gate.counts.admitted_sessions > 10
    assert ranks[0].gate.counts.pauses > 5 or is_always_on


def scheduler_with_waiting(count: int, is_always_on: bool) -> Scheduler:
    """Return a scheduler with one session that runs and ``count`` that wait; no active gate admits them."""
    scheduler = Scheduler(is_always_on=is_always_on)
    for number in range(count + 1):
        scheduler.add(Req(f"r{number}", f"s{number}", 80, number / 1e3))
    running_req = scheduler.waiting_queue.pop(0)
    scheduler.running_batch.reqs.append(running_req)
    take_times(scheduler, ["0.0"])
    return scheduler


@pytest.mark.parametrize("is_always_on", [False, True])
def test_arrivals_and_steps_do_not_read_the_queue(is_always_on, monkeypatch) -> None:
    scheduler = scheduler_with_waiting(300, is_always_on)
    monkeypatch.delattr(ArrangedQueue, "requests")  # read to find requests that left
    queue_lengths = []
    for number in range(20):
        scheduler.add(Req(f"late{number}", f"late{number}", 80, 1.0 + number / 1e3))
        scheduler.choose_nothing(lambda: queue_lengths.append(len(scheduler.waiting_queue)))
    assert set(queue_lengths) == ({0} if is_always_on else set(range(301, 321)))
    assert len(scheduler.waiting_queue) == 320


@pytest.mark.parametrize("is_always_on", [False, True])
def test_an_abort_in_the_queue_is_noticed_by_its_length(is_always_on) -> None:
    scheduler = scheduler_with_waiting(30, is_always_on)
    aborted = scheduler.waiting_queue.pop(7)
    retry = Req("again", aborted.canopy.request.conversation, 90, 1.0)
    scheduler.add(retry)
    assert aborted not in scheduler.gate.requests
    others = scheduler.waiting_queue[:-1]
    assert retry.canopy.request.seniority > max(req.canopy.request.seniority for req in others)


def test_a_retracted_request_keeps_its_admission() -> None:
    scheduler = scheduler_with_waiting(5, is_always_on=True)
    retracted = scheduler.running_batch.reqs.pop()
    scheduler.add(retracted)
    offered = []
    scheduler.choose_nothing(lambda: offered.extend(scheduler.waiting_queue))
    assert offered == [retracted]
    assert scheduler.waiting_queue[-1] is retracted


@pytest.mark.parametrize("reports_aborts", [True, False])
def test_a_preempted_and_a_chosen_request_both_keep_their_admission(reports_aborts: bool) -> None:
    """Preemption: SGLang takes the urgent request from its queue, then puts the running one back."""
    scheduler = Scheduler(is_always_on=False, reports_aborts=reports_aborts)
    scheduler.add(running := Req("running", "s0", 40, 0.0))
    scheduler.step()
    running.canopy.request.phase = RequestPhase.ADMITTED
    scheduler.add(urgent := Req("urgent", "s1", 40, 1.0))

    def choose() -> tuple[Any, None]:
        scheduler.waiting_queue, scheduler.running_batch.reqs = [], []
        scheduler.add(running)
        return SimpleNamespace(reqs=[urgent]), None

    scheduler.admission.choose(scheduler, scheduler.running_batch, choose)
    assert [*scheduler.gate.requests] == [running, urgent]
    assert running.canopy.request.phase is RequestPhase.ADMITTED


@pytest.mark.parametrize("reports_aborts", [True, False])
def test_requests_retracted_together_keep_their_admission(reports_aborts: bool) -> None:
    scheduler = Scheduler(is_always_on=False, reports_aborts=reports_aborts)
    retracted = [Req(f"r{i}", f"s{i}", 40, float(i)) for i in range(3)]
    for req in retracted:
        scheduler.add(req)
    scheduler.step()
    scheduler.running_batch.reqs = []
    for req in retracted:
        req.canopy.request.phase = RequestPhase.ADMITTED
        scheduler.add(req)
    scheduler.offer()
    assert [*scheduler.gate.requests] == retracted
    assert {req.canopy.request.phase for req in retracted} == {RequestPhase.ADMITTED}


def test_a_request_delayed_while_sglang_chooses_is_not_chosen() -> None:
    """A grammar becomes ready there, and until then no session waited."""
    scheduler, offered = Scheduler(), []
    scheduler.add(Req("running", "s0", 90, 0.0))
    scheduler.step()

    def choose() -> tuple[None, None]:
        scheduler.add(Req("late", "s1", 90, 1.0))
        scheduler.admission.arrange(scheduler.waiting_queue, 0, lambda: None)
        offered.extend(scheduler.waiting_queue)
        return None, None

    scheduler.admission.choose(scheduler, scheduler.running_batch, choose)
    assert not offered
    assert scheduler.queue == ["late"]
