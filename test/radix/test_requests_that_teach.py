"""Policies learn from admitted requests, each once: not from copies (n > 1), refusals and retries."""

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_canopy.radix.counters import GIVEN_UP, INVALID, QUEUE
from sglang_canopy.radix.parallel_samples import MAX_TENANT_WARM_UPS, MAX_WARM_UPS, ParallelSamples
from sglang_canopy.reuse.learner import ReuseModel
from sglang_canopy.server.scheduler.arrivals import end_aborted
from sglang_canopy.whatif.meter import Meter, MeterSetup, TierTokens
from support.live_tree import LiveTree, fake_req

BLOCK_TOKENS = 4
SAMPLE_COUNT = 4


def abort_reason(*_: Any) -> Any:
    return type("FINISH_ABORT", (), {})()


class Server:
    """Requests as SGLang's scheduler passes them to a learning tree with a meter."""

    def __init__(self) -> None:
        self.tree = LiveTree(4096, "wa", {"block_tokens": BLOCK_TOKENS})
        self.core = self.tree.core
        self.meter = Meter(MeterSetup(sample_stride=1), TierTokens(4096), "wa")
        self.core.live.meter = self.meter
        self.requests = self.core.requests

    @property
    def model(self) -> ReuseModel:
        return self.core.live.device_policy.model

    def serve(self, req: Any) -> Any:
        """Admit, compute and answer."""
        request = self.requests.admit(req)
        self.requests.report_end(req)
        self.tree.insert([*req.origin_input_ids, *req.output_ids], request)
        return request

    def count_requests_and_tokens(self) -> tuple[int, int]:
        rows = self.core.live.counters.all_counts()
        return sum(row.requests for row in rows), sum(row.prompt_tokens for row in rows)


def chat(time: float, number: int, output_tokens: int = 4, samples: int = 0, **fields: Any) -> Any:
    """Return the first turn of conversation ``c{number}``, which nothing continues."""
    stamp: dict[str, Any] = {"time": time, "category": "chat", "conversation": f"c{number}"}
    if samples:
        stamp["samples"] = samples
    tokens = [1000 * number + i for i in range(1, 19)]
    return fake_req(tokens, [7 + i for i in range(output_tokens)], stamp, **fields)


def expand_samples(time: float, number: int) -> tuple[Any, list[Any]]:
    """Return a request with n = 4 as SGLang expands it: its warm-up and its samples. SGLang sets the samples'
    token limit after it has created them."""
    samples = [chat(time, number, samples=SAMPLE_COUNT) for _ in range(SAMPLE_COUNT)]
    for sample in samples if number % 2 else ():
        sample.sampling_params.max_new_tokens = None
    return chat(time, number, 0, SAMPLE_COUNT), samples


@pytest.fixture
def server():
    return Server()


def test_parallel_samples_are_one_request_in_learning_and_counts(server) -> None:
    for number in range(1, 41):
        warm_up, samples = expand_samples(10.0 * number, number)
        first = server.serve(warm_up)
        # Another client's request arrives before the samples.
        server.serve(chat(10.0 * number + 0.5, 1000 + number))
        waiting = [server.requests.register(req) for req in samples]
        requests = [server.serve(req) for req in samples]
        assert waiting == requests
        assert [request.turn for request in (first, *requests)] == [1] * (SAMPLE_COUNT + 1)
        assert requests[0].label == "chat|end|turn1|out<64|added<512"
    server.model.fit(500.0)
    assert server.model.reuse_count == 0
    assert len(server.model.shadow) == 80
    assert server.count_requests_and_tokens() == (80, 80 * 18)
    assert server.meter.prompt_tokens == 80 * 18
    assert all(learner.model.reuse_count == 0 for learner in learners_with_models(server.meter))
    hits = [node.canopy.hits for node in server.core._node_arena.values() if node.canopy.length]
    assert set(hits) == {1}
    assert len(server.requests.samples) == 0


def test_equal_prompts_of_one_batch_with_samples_are_one_request(server) -> None:
    """SGLang computes the warm-ups of all prompts of a batch before their samples, with one stamp."""
    warm_ups, samples = zip(*(expand_samples(1.0, 1) for _ in range(2)))
    for req in (*warm_ups, *samples[0], *samples[1]):
        server.serve(req)
    assert server.count_requests_and_tokens() == (1, 18)
    assert server.model.reuse_count == 0
    assert len(server.requests.samples) == 0


def learners_with_models(meter: Meter) -> list[Any]:
    return [learner for learner in meter._learners.values() if hasattr(learner, "model")]


def test_a_samples_answer_is_in_the_meters_caches(server) -> None:
    warm_up, samples = expand_samples(1.0, 1)
    server.serve(warm_up)
    blocks_before = set(server.meter.caches.count_blocks().values())
    for number, req in enumerate(samples):
        req.output_ids = [500 + number] * 8
        server.serve(req)
    blocks_after = set(server.meter.caches.count_blocks().values())
    assert (blocks_before, blocks_after) == ({4}, {4 + 2 * SAMPLE_COUNT})


def test_the_same_prompt_in_another_request_is_no_sample(server) -> None:
    for time in (1.0, 2.0):
        warm_up, samples = expand_samples(time, 1)
        for req in (warm_up, *samples):
            server.serve(req)
    assert server.count_requests_and_tokens()[0] == 2
    assert server.model.reuse_count == 1


PRIORITY_ERROR = "Using priority is disabled for this server."


@pytest.mark.parametrize("cause", ["queue", "invalid", "priority", "given_up", "between chunks"])
def test_a_retry_of_a_refused_request_is_no_turn_and_no_return(cause: str) -> None:
    server = Server()
    scheduler = SimpleNamespace(tree_cache=server.tree.cache)
    for number in range(1, 31):
        for attempt in range(3):
            req = chat(100.0 * number + 5.0 * attempt, number)
            request = server.requests.register(req)
            if cause == "invalid":  # SGLang computes one token to answer it
                req.origin_input_ids, req.to_finish = [0], abort_reason()
                assert server.requests.admit(req) is None
                req.finished_reason = req.to_finish
                server.requests.report_end(req)
                server.tree.insert([0], None)
            elif cause == "between chunks":
                server.tree.insert(req.origin_input_ids[:8], server.requests.admit(req))
                end_aborted(None, scheduler, SimpleNamespace(finished_reason=None), req)
                assert not request.misses
            else:
                message = "The request queue is full." if cause == "queue" else PRIORITY_ERROR
                reason = None if cause == "given_up" else {"status_code": 503, "message": message}
                end_aborted(None, scheduler, SimpleNamespace(finished_reason=reason), req)
        assert server.serve(chat(100.0 * number + 15.0, number)).turn == 1
    assert server.model.reuse_count == 0
    assert server.count_requests_and_tokens() == (30, 30 * 18)
    assert server.meter.prompt_tokens == 30 * 18
    refusals = {"invalid": INVALID, "priority": INVALID, "queue": QUEUE, "given_up": GIVEN_UP}
    expected_counts = [90 * (refusals.get(cause) == refusal) for refusal in range(3)]
    assert server.core.live.counters.refusal_counts == expected_counts


def test_a_retry_of_a_truncated_answer_is_the_same_turn(server) -> None:
    for number in range(1, 31):
        for attempt in range(3):
            req = chat(100.0 * number + 5.0 * attempt, number, 2, finished_reason=abort_reason())
            server.serve(req)
        assert server.serve(chat(100.0 * number + 15.0, number)).turn == 1
        next_turn = chat(100.0 * number + 40.0, number)
        next_turn.origin_input_ids = [*next_turn.origin_input_ids, *range(900, 920)]
        assert server.serve(next_turn).turn == 2
    server.model.fit(4000.0)
    assert server.model.reuse_count == 30  # the second turns
    curve = server.model.categories.get("chat|end|turn1|out<64|added<512")
    assert sum(curve.events) == 30
    assert sum(curve.waiting) == 0


def test_an_overtaken_request_does_not_set_the_clock_back(server) -> None:
    overtaken, overtaking = chat(1.0, 1), chat(2.0, 2)
    for req in (overtaken, overtaking):
        server.requests.register(req)
    assert server.serve(overtaking).time == 2.0
    assert server.serve(overtaken).time == 2.0


def test_remembered_warm_ups_are_bounded_by_tenant_and_in_total() -> None:
    samples = ParallelSamples()

    def arrive(tenant: str, number: int) -> Any:
        request = SimpleNamespace(
            tenant=tenant,
            sample_group=(float(number), 0),
            pending_samples=2,
            warm_up=None,
            number=number,
            time=0.0,
        )
        samples.register(request)
        return request

    arrive("steady", 0)
    for number in range(1, 2000):
        arrive("other", number)
    assert len(samples) == 1 + MAX_TENANT_WARM_UPS
    for number in range(5000):
        arrive(f"t{number}", 5000 + number)
    assert len(samples) == MAX_WARM_UPS
    assert arrive("t4999", 9999).warm_up is not None


def test_a_health_probe_is_no_request(server) -> None:
    """SGLang sends itself a probe every few seconds."""
    for rid, expected_requests in (("HEALTH_CHECK_1f", 0), ("1f", 1)):
        req = fake_req(list(range(200)), [1], rid=rid)
        assert server.requests.register(req) is server.requests.register(req)
        server.requests.report_end(req)
        assert server.count_requests_and_tokens()[0] == expected_requests
        assert bool(server.model.shadow.block_count) == bool(expected_requests)
