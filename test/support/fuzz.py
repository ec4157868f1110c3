"""Random operations on SGLang's own scheduler. A set-up is a list of flags, and actions by name.

Requests arrive alone and in samples, with true and false hints; clients disconnect and retry; requests are
retracted and paused; the cache is flushed, the order of eviction changes, and conversations bring documents.
A run returns counts. ``wrong``: answers that differ from the answer to the prompt alone.
``changed_by_wrong_kv``: prompts whose answer changes if their cached KV is exchanged, so that ``wrong`` counts
wrong KV. ``approximate``: answers with reuse of documents that differ, as they may.
"""

from __future__ import annotations

import gc
import operator
import pickle
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.admission.gate import SessionGate
from sglang_canopy.policy.floored import FlooredPolicy
from sglang_canopy.records import LateHint
from sglang_canopy.server.scheduler.admission import Admission
from sglang_canopy.wire.messages import TIME
from support.bound_ledger import BoundLedger
from support.evictable_recount import recount_core
from support.prompts import continuing_prompts
from support.scheduler import KV_TOKENS, SteppedScheduler
from support.tier_books import TierBooks

ANSWER_TOKENS, PROMPT_COUNT = 6, 14
MAX_RUNNING, MAX_STEPS, RECOUNT_EVERY_STEPS = 12, 2_000, 5
EMBEDDING_NAME = "model.embed_tokens.weight"


class RunningRequest(NamedTuple):
    """A request of the run: the number of its prompt, how it uses documents, and SGLang's ``Req``."""

    prompt_number: int
    document_use: str
    req: Any


class Fuzz:
    """One run. Every choice comes from ``seed``; times are the machine's."""

    def __init__(self, engine: SteppedScheduler, seed: int) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.core = engine.scheduler.tree_cache.tree_core
        self.books = TierBooks(self.core)
        self.rng = random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.running: list[RunningRequest] = []
        self.request_refs: list[Any] = []
        self.refused_reqs: list[Any] = []
        self.weights_version = 0
        self.prompts = self.make_prompts(seed)
        self.expected_answers = self.compute_expected_answers(seed)
        """Answers by ``weights_version`` and number of the prompt."""
        sender = self.scheduler.ipc_channels.send_to_tokenizer
        send = sender.send_output

        def record_refusal(output: Any, req: Any = None) -> Any:
            """Note a request that the queue's limit refuses or pushes out, and pass the message on."""
            if type(output).__name__ == "AbortReq":
                self.refused_reqs.append(req)
            return send(output, req)

        sender.send_output = record_refusal

    def make_prompts(self, seed: int) -> list[list[int]]:
        usable_ids = self.scheduler.model_config.vocab_size - 3
        prompts = continuing_prompts(PROMPT_COUNT, seed, max_shared_tokens=600)
        return [[3 + token % usable_ids for token in ids] for ids in prompts]

    def compute_expected_answers(self, seed: int) -> list[list[list[int]]]:
        wrong_kv_answers = self.answers_from_wrong_kv()
        answers = [self.answer(ids) for ids in self.prompts]
        self.counts["changed_by_wrong_kv"] = sum(map(operator.ne, answers, wrong_kv_answers))
        return [answers]

    def answer(self, ids: list[int], tenant: str | None = None) -> list[int]:
        self.engine.serve([req := self.engine.feed(ids, ANSWER_TOKENS, extra_key=tenant)])
        return list(req.output_ids)

    def answers_from_wrong_kv(self) -> list[list[int]]:
        """Serve the prompts, exchange their KV on the device with each other's, and serve them again.
        Their tenant sends nothing else, so no other request reads this KV from the disk."""
        pool = self.scheduler.token_to_kv_pool_allocator.get_kvcache()
        for ids in self.prompts:
            self.answer(ids, "wrong KV")
        for layer in range(pool.layer_num):
            for buffer in pool.get_kv_buffer(layer):
                buffer.copy_(buffer.flip(0))
        answers = [self.answer(ids, "wrong KV") for ids in self.prompts]
        for _ in range(3):
            self.engine.step()
        assert self.scheduler.flush_cache()
        return answers

    def run_steps(self, steps: int, actions: dict[str, float]) -> dict[str, Any]:
        """Take ``steps`` steps, then drain. ``actions``: the probability of each action in a step."""
        gate, ledger = arm_gate(self.engine), tighten_budgets(self.engine)
        for step_number in range(1, steps + 1):
            for name, probability in actions.items():
                if self.rng.random() < probability:
                    ACTIONS[name](self)
            self.advance(self.rng.randrange(4))
            if step_number % RECOUNT_EVERY_STEPS == 0:
                recount_core(self.core)
            self.act_after(step_number, steps)
        self.drain()
        if ledger is not None:
            ledger.close()
            self.counts["bound_violations"] = ledger.violations
            self.counts["max_used_percent"] = 100 * ledger.max_used_fraction
        if gate is not None:
            self.counts["delayed_sessions"] = gate.stats()["delayed_sessions"]
        loop = self.engine.overlap_loop
        self.counts["results_in_flight"] = loop.iterations_with_result_in_flight if loop else 0
        return {**self.counts, **remaining_state(self.engine, self.request_refs)}

    def act_after(self, step_number: int, steps: int) -> None:
        """Act after step ``step_number`` of ``steps``; nothing by default."""

    def advance(self, steps: int, ahead_s: float = 0.0) -> None:
        for _ in range(steps):
            self.engine.step()
        set_internal_state(self.scheduler, TIME.key(repr(time.monotonic() + ahead_s)))
        for request in [request for request in self.running if request.req.finished()]:
            self.running.remove(request)
            if request.req.finished_reason.to_json()["type"] == "length":
                self.check_answer(*request)

    def check_answer(self, prompt_number: int, document_use: str, req: Any) -> None:
        self.counts["answered"] += 1
        self.counts["retracted"] += req.retraction_count
        differs = list(req.output_ids) != self.expected_answers[self.weights_version][prompt_number]
        self.counts["approximate" if document_use == "fused" else "wrong"] += differs
        for tier, tokens in (("host", req.cached_tokens_host), ("disk", req.cached_tokens_storage)):
            reuse_kind = "kept" if document_use == "fused" else "exact"
            self.counts[f"{reuse_kind}_from_{tier}"] += tokens > 0

    def feed(self, prompt_number: int, document_use: str = "exact", **fields: Any) -> None:
        self.counts["arrived"] += 1
        req = self.engine.feed(self.prompts[prompt_number], ANSWER_TOKENS, **fields)
        if req is not None:
            self.request_refs.append(weakref.ref(req))
            self.running.append(RunningRequest(prompt_number, document_use, req))
        remaining = [r for r in self.running if not any(r.req is req for req in self.refused_reqs)]
        self.counts["refused"] += len(self.running) - len(remaining) + (req is None)
        self.running = remaining
        self.refused_reqs.clear()

    def drain(self) -> None:
        """Serve the remaining requests. Time passes faster, so that the gate admits every session."""
        for step in range(MAX_STEPS):
            if not self.running:
                break
            self.advance(1, ahead_s=float(step))
        self.counts["unserved"] = len(self.running)
        self.running.clear()
        self.refused_reqs.clear()
        if self.engine.overlap_loop is not None:
            # SGLang keeps the last two overlapped batches: fill both with another request's.
            self.engine.serve([self.engine.feed([5] * 8, ANSWER_TOKENS)])
        self.advance(3)
        self.engine.settle()
        recount_core(self.core)
        self.books.check()


# Actions of a step.


def arrive(fuzz: Fuzz) -> None:
    """Send one request or three samples of it, with a random stamp, whose hints may be false."""
    if len(fuzz.running) >= MAX_RUNNING:
        return
    rng, stamp = fuzz.rng, {}
    if rng.random() < 0.5:
        stamp |= {"conversation": rng.choice("xyz"), "linear": rng.random() < 0.5}
    for key, values in (
        ("keep_s", (0.0, 1.0, 100.0)),
        ("over", (True,)),
        ("return_in_s", (0.0, 0.1, 50.0)),
    ):
        if rng.random() < 0.2:
            stamp[key] = rng.choice(values)
    arrival_s = time.monotonic() + rng.choice([0.0, 0.0, 0.0, -100.0, 30.0])
    prompt_number, samples = rng.randrange(PROMPT_COUNT), rng.choice([1, 1, 1, 3])
    fuzz.counts["samples"] += samples > 1
    fields: dict[str, Any] = {"extra_key": rng.choice([None, "a", "b"])}
    if fuzz.scheduler.enable_priority_scheduling:
        fields["priority"] = rng.randrange(3)
    for _ in range(samples):
        fuzz.feed(prompt_number, time_s=arrival_s, stamp=dict(stamp), **fields)


def leave(fuzz: Fuzz) -> None:
    """Abort a request. Often its client retries, at times with the same request id, even for another prompt."""
    if not fuzz.running:
        return
    rng = fuzz.rng
    prompt_number, document_use, req = fuzz.running.pop(rng.randrange(len(fuzz.running)))
    if req.finished():
        return
    fuzz.engine.abort(req.rid)
    fuzz.counts["aborts"] += 1
    if document_use == "exact" and rng.random() < 0.7:
        fuzz.counts["retries"] += 1
        same_rid = rng.random() < 0.5 and req.rid not in {r.req.rid for r in fuzz.running}
        fuzz.counts["repeated_names"] += same_rid
        if same_rid and rng.random() < 0.5:
            prompt_number = rng.randrange(PROMPT_COUNT)
        fuzz.feed(prompt_number, extra_key=req.extra_key, **({"rid": req.rid} if same_rid else {}))


def change_order(fuzz: Fuzz) -> None:
    """Choose whether the policies or LRU rank from now on, as the floor does."""
    live, ranks_by_lru = fuzz.core.live, fuzz.rng.random() < 0.5
    for policy in (live.device_policy, live.host_policy):
        if isinstance(policy, FlooredPolicy):
            policy.rank_by(ranks_by_lru)
    fuzz.counts["orders"] += 1


def pause(fuzz: Fuzz) -> None:
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    mode = fuzz.rng.choice(["retract", "in_place"])
    fuzz.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
    fuzz.counts["pauses"] += 1
    if fuzz.rng.random() < 0.5:
        arrive(fuzz)
    if mode == "retract" and fuzz.rng.random() < 0.5:
        fuzz.counts["flushes"] += bool(fuzz.scheduler.flush_cache())
    fuzz.scheduler.continue_generation(ContinueGenerationReqInput())


def hint(fuzz: Fuzz) -> None:
    name = fuzz.rng.choice("xyz")
    hint_fields = fuzz.rng.choice([{"over": True}, {"return_in_s": 3.0}, {"keep_s": 10.0}])
    fuzz.core.conversations.apply_hint(LateHint(None, name, fuzz.core.clock.now, **hint_fields))
    fuzz.counts["hints"] += 1


def flush(fuzz: Fuzz) -> None:
    if not fuzz.running:
        fuzz.advance(3)
        fuzz.counts["flushes"] += bool(fuzz.scheduler.flush_cache())


SYSTEM_TOKENS, DOCUMENT_TOKENS, QUESTION_TOKENS = 20, 48, 9
CONVERSATION_COUNT, DOCUMENT_COUNT = 10, 32
DOCUMENT_USES = ("plain", "off", "ratio 1", "fused", "fused")


class DocumentFuzz(Fuzz):
    """Exact requests, requests at ratio 1 and approximate ones name the same documents in turns of the same
    conversations. Thrice in a run the weights are updated to other ones or back."""

    def make_prompts(self, seed: int) -> list[list[int]]:
        """Make two turns of each conversation; a tool returns documents before the second."""
        document_rng, self.bounds, prompts = random.Random(0), [], []
        documents = [self.draw_ids(document_rng, DOCUMENT_TOKENS) for _ in range(DOCUMENT_COUNT)]
        for _ in range(CONVERSATION_COUNT):
            ids, bounds = self.draw_ids(random.Random(1), SYSTEM_TOKENS), []
            document_order = self.rng.sample(range(DOCUMENT_COUNT), 6)
            for documents_of_turn in (document_order[:4], document_order[4:]):
                for number in documents_of_turn:
                    bounds = [*bounds, len(ids), len(ids) + DOCUMENT_TOKENS]
                    ids = ids + documents[number]
                ids = ids + self.draw_ids(self.rng, QUESTION_TOKENS)
                prompts.append(ids)
                self.bounds.append(bounds)
        return prompts

    def draw_ids(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(3, self.scheduler.model_config.vocab_size) for _ in range(count)]

    def compute_expected_answers(self, seed: int) -> list[list[list[int]]]:
        import torch

        self.model_runner = self.scheduler.tp_worker.model_runner
        parameters = dict(self.model_runner.model.named_parameters())
        embedding = parameters[EMBEDDING_NAME].detach().clone()
        permutation = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(seed))
        self.embeddings, expected = [embedding, embedding[permutation]], {}
        for version in (1, 0):
            self.update_weights(version)
            expected[version] = [self.answer(ids) for ids in self.prompts]
        return [expected[0], expected[1]]

    def update_weights(self, version: int) -> None:
        """Load the embedding ``version`` as an update of the weights does, once nothing runs."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        self.engine.settle()
        updater = self.scheduler.weight_updater
        # SGLang's own serializer moves tensors through its pools, which are not there for a CPU.
        tensors = [pickle.dumps([(EMBEDDING_NAME, self.embeddings[version])])]
        update = UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors, flush_cache=True)
        for result in (
            updater.begin_weight_update(BeginWeightUpdateReqInput()),
            updater.update_weights_from_tensor(update),
            updater.end_weight_update(EndWeightUpdateReqInput()),
        ):
            assert result.success, result
        self.weights_version = version

    def act_after(self, step_number: int, steps: int) -> None:
        if step_number % (steps // 3) == 0:
            self.drain()
            # Hits of the store, which new weights replace.
            hits = self.model_runner.canopy.counters()["store"]["hits"]
            self.counts.update({f"documents_from_{tier}": hits[tier] for tier in ("host", "disk")})
            self.update_weights(1 - self.weights_version)
            self.counts["updates"] += 1

    def run_steps(self, steps: int, actions: dict[str, float]) -> dict[str, Any]:
        counts = super().run_steps(steps, actions)
        document_counts = self.model_runner.canopy.counters()
        count_names = ("fused_requests", "kept_requests", "replanned_requests", "fallbacks")
        return counts | {name: document_counts[name] for name in count_names}


def turn_with_documents(fuzz: DocumentFuzz) -> None:
    """Send one request, or three samples of it."""
    if len(fuzz.running) >= MAX_RUNNING:
        return
    rng = fuzz.rng
    prompt_number, document_use = rng.randrange(len(fuzz.prompts)), rng.choice(DOCUMENT_USES)
    custom_params: dict[str, Any] = (
        {} if document_use == "plain" else {"canopy_document_bounds": fuzz.bounds[prompt_number]}
    )
    if document_use == "off":
        custom_params = {"canopy_document_bounds": "off"}
    if document_use == "ratio 1":
        custom_params["canopy_recompute_ratio"] = 1.0
    samples = rng.choice([1, 1, 1, 3])
    fuzz.counts["samples"] += samples > 1
    for _ in range(samples):
        fuzz.feed(prompt_number, document_use, custom=dict(custom_params))


ACTIONS: dict[str, Callable[[Any], None]] = {
    action.__name__: action
    for action in (arrive, leave, change_order, pause, hint, flush, turn_with_documents)
}


# Set-up and checks of a run.


def set_internal_state(scheduler: Any, key: str) -> bool:
    from sglang.srt.managers.io_struct import SetInternalStateReq

    return scheduler.set_internal_state(SetInternalStateReq(server_args={key: 1})).updated


def arm_gate(engine: SteppedScheduler) -> SessionGate | None:
    """Replace the server's gate, which waits for thrash, by one that holds every session that does not
    fit."""
    cache = engine.scheduler.tree_cache
    if cache.admission.gate is not None:
        gate = SessionGate(GateSettings(always=True), KV_TOKENS)
        cache.admission = Admission(cache.admission.order, gate)
    return cache.admission.gate


def tighten_budgets(engine: SteppedScheduler) -> BoundLedger | None:
    """Return accounts of overtaking if the order is ours. The budgets are small enough to matter for
    these prompts of at most 1,000 tokens."""
    cache = engine.scheduler.tree_cache
    order = cache.admission.order
    if not order.is_on:
        return None
    order.bounded_queue.cost_factor, order.bounded_queue.base_budget_s = 2.0, 0.0
    return BoundLedger(
        order.bounded_queue,
        lambda waiting: cache.has_ongoing_prefetch(waiting.request.cache_request_handle),
    )


def remaining_state(engine: SteppedScheduler, request_refs: list[Any]) -> dict[str, Any]:
    """Return the remaining state of a server after all clients left."""
    scheduler = engine.scheduler
    scheduler.last_batch = None
    scheduler.running_batch.chunked_req = None  # SGLang's own note of the last prompt in chunks
    gc.collect()
    cache = scheduler.tree_cache
    cache.sanity_check()
    order, gate, waiting = cache.admission.order, cache.admission.gate, cache.admission._waiting
    return {
        "requests": sum(ref() is not None for ref in request_refs),
        "waiting": len(scheduler.waiting_queue),
        "in_queue": len(order.arranged.requests())
        + len(order.bounded_queue.in_order())
        + len(waiting),
        "in_gate": len(gate.requests) + len(gate.waiting) if gate else 0,
        "locked": cache.protected_size(),
        "slots": scheduler.req_to_token_pool.size - scheduler.req_to_token_pool.available_size(),
    }


def run_fuzz(
    start: Callable[[], SteppedScheduler], seed: int, steps: int, actions: dict[str, float]
) -> dict[str, Any]:
    from sglang_canopy.server.scheduler import cache_factory

    cache_factory.has_floor = lambda _: True
    fuzz_class = DocumentFuzz if "turn_with_documents" in actions else Fuzz
    return fuzz_class(start(), seed).run_steps(steps, actions)
