"""Random operations on SGLang's own scheduler in one process, with or without overlap.

    cd test && python -m support.chaos_worker MODEL SEED STEPS ARGUMENT...

Requests arrive alone and in samples, with true and false hints. Some are aborted, retracted or paused;
the cache is flushed and the order of eviction changes meanwhile. Prints one JSON object of counts.
``wrong``: answers that differ from the answer to the prompt alone. ``other_from_wrong_kv``: prompts
whose answer changes if their cached KV is exchanged: only of these ``wrong`` counts wrong KV.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

from sglang_canopy.policy.floored import Floored
from sglang_canopy.wire.messages import TIME
from support.evictable_recount import recount_leaves, recount_protected
from support.leaving_worker import MAX_STEPS, what_is_held, with_armed_gate, with_tight_budgets
from support.prompts import continuing_prompts
from support.scheduler_worker import InProcess, end_with
from support.tier_books import TierBooks

ANSWER = 6
PROMPTS = 14
MAX_WAITING = 12
CHECK_EVERY = 5
COUNTS = (
    *("came", "answered", "wrong", "aborts", "orders", "pauses"),
    *("retracted", "flushes", "samples", "hints"),
)


class Chaos:
    """One run. Every choice comes from ``seed``; times are the machine's."""

    def __init__(self, engine: InProcess, seed: int, vocabulary: int) -> None:
        self.engine, self.scheduler = engine, engine.scheduler
        self.core = engine.scheduler.tree_cache.tree_core
        self.books = TierBooks(self.core)
        self.draw = random.Random(seed)
        prompts = continuing_prompts(PROMPTS, seed, most_shared=600)
        self.prompts = [[3 + token % (vocabulary - 3) for token in ids] for ids in prompts]
        self.counts = dict.fromkeys(COUNTS, 0)
        self.running: list[tuple[int, Any]] = []
        """Number of the prompt, and SGLang's ``Req``."""
        mistaken = self.answers_from_wrong_kv()
        self.alone = [self.answer(ids) for ids in self.prompts]
        self.counts["other_from_wrong_kv"] = sum(a != b for a, b in zip(self.alone, mistaken))

    def answer(self, ids: list[int], tenant: str | None = None) -> list[int]:
        self.engine.serve([req := self.engine.feed(ids, ANSWER, extra_key=tenant)])
        return list(req.output_ids)

    def answers_from_wrong_kv(self) -> list[list[int]]:
        """Serve the prompts, exchange their KV on the device with each other's, and serve them again.
        Their tenant sends nothing else, so no other request meets this KV on the disk."""
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

    def live(self, steps: int) -> dict[str, Any]:
        """Take ``steps`` random steps, then drain; return counts and leaks."""
        gate, ledger = with_armed_gate(self.engine), with_tight_budgets(self.engine)
        for number in range(steps):
            self.one_step()
            if number % CHECK_EVERY == 0:
                check_books(self.core)
        self.drain()
        if ledger is not None:
            ledger.close()
            self.counts["over_bound"] = ledger.over
        if gate is not None:
            self.counts["delayed_sessions"] = gate.stats()["delayed_sessions"]
        turns = self.engine.turns
        return {
            **self.counts,
            **what_is_held(self.engine, []),
            "turns_in_flight": 0 if turns is None else turns.in_flight,
        }

    def one_step(self) -> None:
        draw = self.draw
        if len(self.running) < MAX_WAITING and draw.random() < 0.5:
            self.request()
        if self.running and draw.random() < 0.15:
            _, req = self.running.pop(draw.randrange(len(self.running)))
            if not req.finished():
                self.engine.abort(req.rid)
                self.counts["aborts"] += 1
        if draw.random() < 0.06:
            self.change_order()
        if draw.random() < 0.04:
            self.pause()
        if draw.random() < 0.1:
            self.hint()
        self.turns(draw.randrange(4))
        if not self.running and draw.random() < 0.3:
            self.turns(3)
            self.counts["flushes"] += bool(self.scheduler.flush_cache())

    def turns(self, count: int, ahead_s: float = 0.0) -> None:
        for _ in range(count):
            self.engine.step()
        self.internal_state(TIME.key(repr(time.monotonic() + ahead_s)))
        for pair in [pair for pair in self.running if pair[1].finished()]:
            self.running.remove(pair)
            self.judge(*pair)

    def judge(self, which: int, req: Any) -> None:
        if req.finished_reason.to_json()["type"] == "length":
            self.counts["answered"] += 1
            self.counts["retracted"] += req.retraction_count
            self.counts["wrong"] += list(req.output_ids) != self.alone[which]

    def request(self) -> None:
        """One request or three samples of it, its stamp drawn: what clients state may be false."""
        draw, stamp = self.draw, {}
        if draw.random() < 0.5:
            stamp |= {"conversation": draw.choice("xyz"), "linear": draw.random() < 0.5}
        for key, values in (
            ("keep_s", (0.0, 1.0, 100.0)),
            ("over", (True,)),
            ("return_in_s", (0.0, 0.1, 50.0)),
        ):
            if draw.random() < 0.2:
                stamp[key] = draw.choice(values)
        at = time.monotonic() + draw.choice([0.0, 0.0, 0.0, -100.0, 30.0])
        which, samples = draw.randrange(PROMPTS), draw.choice([1, 1, 1, 3])
        self.counts["samples"] += samples > 1
        more = {"extra_key": draw.choice([None, "a", "b"])}
        if self.scheduler.enable_priority_scheduling:
            more["priority"] = draw.randrange(3)
        for _ in range(samples):
            self.counts["came"] += 1
            req = self.engine.feed(self.prompts[which], ANSWER, at=at, stamp=dict(stamp), **more)
            if req is not None:
                self.running.append((which, req))

    def change_order(self) -> None:
        """Let the policies or LRU rank from now on, as the floor does."""
        live, lru = self.core.live, self.draw.random() < 0.5
        for policy in (live.device_policy, live.host_policy):
            if isinstance(policy, Floored):
                policy.rank_by(lru)
        self.counts["orders"] += 1

    def internal_state(self, key: str) -> bool:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        return self.scheduler.set_internal_state(SetInternalStateReq(server_args={key: 1})).updated

    def pause(self) -> None:
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        mode = self.draw.choice(["retract", "in_place"])
        self.scheduler.pause_generation(PauseGenerationReqInput(mode=mode))
        self.counts["pauses"] += 1
        if self.draw.random() < 0.5:
            self.request()
        if mode == "retract" and self.draw.random() < 0.5:
            self.counts["flushes"] += bool(self.scheduler.flush_cache())
        self.scheduler.continue_generation(ContinueGenerationReqInput())

    def hint(self) -> None:
        about = {"tenant": None, "conversation": self.draw.choice("xyz"), "source": "client"}
        about |= {"time": self.core.clock.now}
        about |= self.draw.choice([{"over": True}, {"return_in_s": 3.0}, {"keep_s": 10.0}])
        self.core.conversations.apply_hint(about)
        self.counts["hints"] += 1

    def drain(self) -> None:
        """Serve the remaining requests. Time passes faster, so that the gate admits every session."""
        for number in range(MAX_STEPS):
            if not self.running:
                break
            self.turns(1, ahead_s=float(number))
        self.counts["unserved"] = len(self.running)
        self.running.clear()
        self.turns(3)
        check_books(self.core)
        self.books.check()


def check_books(core: Any) -> None:
    """Compare the leaves that the policies rank with the evictable nodes of SGLang's tree, in both tiers."""
    nodes = [node for node in core._node_arena.values() if node is not core.root_node]
    for leaves, may_go in (
        (core.evictable_device_leaves, core._is_device_leaf),
        (core.evictable_host_leaves, core._is_host_leaf),
    ):
        expected = {node for node in nodes if may_go(node)}
        assert set(leaves) == expected, (len(leaves), len(expected))
        recount_leaves(leaves, expected)
    recount_protected(core)
    for node in nodes:
        if node.canopy.length:
            assert node.canopy.length == len(node.key)
            assert node.canopy.offset == node.parent.canopy.offset + node.parent.canopy.length


def main() -> None:
    import torch

    from sglang_canopy.server.scheduler import cache_factory

    cache_factory.keeps_floor = lambda _: True
    engine = InProcess(Path(sys.argv[1]), sys.argv[4:])
    vocabulary = engine.scheduler.model_config.vocab_size
    with torch.no_grad():
        found = Chaos(engine, int(sys.argv[2]), vocabulary).live(int(sys.argv[3]))
    end_with(found)


if __name__ == "__main__":
    main()
