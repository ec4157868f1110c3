"""Conversations with documents on SGLang's own scheduler, under random operations: see `chaos_worker`.

    cd test && python -m support.documents_worker MODEL SEED STEPS ARGUMENT...

Exact requests, requests at ratio 1 and approximate ones name the same documents in turns of the same
conversations, alone and in samples. Some are aborted or retracted, KV goes to host memory and disk and
back, and the weights are updated to other ones and back. ``wrong``: exact answers that differ from those
to the prompt alone; ``approximate``: answers with reuse that do.
"""

from __future__ import annotations

import pickle
import random
import sys
from pathlib import Path
from typing import Any

from support.chaos_worker import ANSWER, MAX_WAITING, check_books
from support.leaving_worker import MAX_STEPS, what_is_held
from support.scheduler_worker import InProcess, end_with

SYSTEM, DOCUMENT, QUESTION = 20, 48, 9
CONVERSATIONS, DOCUMENTS = 10, 32
WAYS = ("plain", "off", "ratio 1", "fused", "fused")
EMBEDDING = "model.embed_tokens.weight"
COUNTS = (
    *("came", "answered", "wrong", "approximate", "samples", "aborts", "retracted", "updates"),
    *("exact_from_host", "exact_from_disk", "kept_from_host", "kept_from_disk"),
    *("documents_from_host", "documents_from_disk"),
)


class DocumentChaos:
    """One run. Every choice comes from ``seed``."""

    def __init__(self, engine: InProcess, seed: int) -> None:
        import torch

        self.engine, self.scheduler = engine, engine.scheduler
        self.runner = engine.scheduler.tp_worker.model_runner
        self.draw = random.Random(seed)
        self.counts = dict.fromkeys(COUNTS, 0)
        self.running: list[tuple[int, str, Any]] = []
        """Number of the prompt, way, and SGLang's ``Req``."""
        self.prompts = [turn for _ in range(CONVERSATIONS) for turn in self.conversation()]
        first = dict(self.runner.model.named_parameters())[EMBEDDING].detach().clone()
        other = first[torch.randperm(len(first), generator=torch.Generator().manual_seed(seed))]
        self.weights, self.at = [first, other], 0
        self.alone: list[list[list[int]]] = [[], []]
        """Plain answers by weights and prompt."""
        for at in (1, 0):
            self.update(at)
            self.alone[at] = [self.answer(ids) for ids, _ in self.prompts]

    def conversation(self) -> list[tuple[list[int], list[int]]]:
        """Return two turns, each with ids and bounds; a tool returns documents before the second."""
        draw, texts = self.draw, random.Random(0)
        documents = [self.text(texts, DOCUMENT) for _ in range(DOCUMENTS)]
        ids, bounds, turns = self.text(texts, SYSTEM), [], []
        order = draw.sample(range(DOCUMENTS), 6)
        for some in (order[:4], order[4:]):
            for number in some:
                bounds = [*bounds, len(ids), len(ids) + DOCUMENT]
                ids = ids + documents[number]
            ids = ids + self.text(draw, QUESTION)
            turns.append((ids, bounds))
        return turns

    def text(self, draw: random.Random, count: int) -> list[int]:
        most = self.scheduler.model_config.vocab_size
        return [draw.randrange(3, most) for _ in range(count)]

    def answer(self, ids: list[int]) -> list[int]:
        self.engine.serve([req := self.engine.feed(ids, ANSWER)])
        return list(req.output_ids)

    def update(self, at: int) -> None:
        """Load the embedding ``at`` as an update of the weights does, once nothing runs."""
        from sglang.srt.managers.io_struct import (
            BeginWeightUpdateReqInput,
            EndWeightUpdateReqInput,
            UpdateWeightsFromTensorReqInput,
        )

        self.engine.settle()
        updater = self.scheduler.weight_updater
        # SGLang's own serializer moves tensors through its pools, which are not there for a CPU.
        tensors = [pickle.dumps([(EMBEDDING, self.weights[at])])]
        ask = UpdateWeightsFromTensorReqInput(serialized_named_tensors=tensors, flush_cache=True)
        for done in (
            updater.begin_weight_update(BeginWeightUpdateReqInput()),
            updater.update_weights_from_tensor(ask),
            updater.end_weight_update(EndWeightUpdateReqInput()),
        ):
            assert done.success, done
        self.at = at

    def live(self, steps: int, update_every: int) -> dict[str, Any]:
        """Take ``steps`` random steps, then drain; return counts and leaks."""
        for number in range(1, steps + 1):
            if len(self.running) < MAX_WAITING and self.draw.random() < 0.5:
                self.request()
            if self.running and self.draw.random() < 0.1:
                _, _, req = self.running.pop(self.draw.randrange(len(self.running)))
                if not req.finished():
                    self.engine.abort(req.rid)
                    self.counts["aborts"] += 1
            self.turns(self.draw.randrange(4))
            if number % update_every == 0:
                self.drain()
                self.count_documents()
                self.update(1 - self.at)
                self.counts["updates"] += 1
        self.drain()
        self.count_documents()
        found = self.runner.canopy_chunks.counted()
        names = ("fused_requests", "kept_requests", "replanned_requests", "fallbacks")
        return {
            **self.counts,
            **{name: found[name] for name in names},
            **what_is_held(self.engine, []),
        }

    def count_documents(self) -> None:
        """Count the hits of the store, which new weights replace."""
        hits = self.runner.canopy_chunks.counted()["store"]["hits"]
        for tier in ("host", "disk"):
            self.counts[f"documents_from_{tier}"] += hits[tier]

    def request(self) -> None:
        """One request, or three samples of it."""
        which, way = self.draw.randrange(len(self.prompts)), self.draw.choice(WAYS)
        ids, bounds = self.prompts[which]
        custom: dict[str, Any] = {} if way == "plain" else {"canopy_chunks": bounds}
        if way == "off":
            custom = {"canopy_chunks": "off"}
        if way == "ratio 1":
            custom["canopy_recompute_ratio"] = 1.0
        samples = self.draw.choice([1, 1, 1, 3])
        self.counts["samples"] += samples > 1
        for _ in range(samples):
            self.counts["came"] += 1
            req = self.engine.feed(ids, ANSWER, custom=dict(custom))
            if req is not None:
                self.running.append((which, way, req))

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()
        for one in [one for one in self.running if one[2].finished()]:
            self.running.remove(one)
            self.judge(*one)

    def judge(self, which: int, way: str, req: Any) -> None:
        if req.finished_reason.to_json()["type"] != "length":
            return
        kind = "kept" if way == "fused" else "exact"
        differs = list(req.output_ids) != self.alone[self.at][which]
        self.counts["answered"] += 1
        self.counts["retracted"] += req.retraction_count
        self.counts[f"{kind}_from_host"] += req.cached_tokens_host > 0
        self.counts[f"{kind}_from_disk"] += req.cached_tokens_storage > 0
        self.counts["approximate" if way == "fused" else "wrong"] += differs

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.running:
                break
            self.turns(1)
        assert not self.running
        self.engine.settle()
        check_books(self.scheduler.tree_cache.tree_core)


def main() -> None:
    import torch

    engine = InProcess(Path(sys.argv[1]), sys.argv[5:])
    with torch.no_grad():
        run = DocumentChaos(engine, int(sys.argv[2]))
        found = run.live(int(sys.argv[3]), int(sys.argv[4]))
    end_with(found)


if __name__ == "__main__":
    main()
