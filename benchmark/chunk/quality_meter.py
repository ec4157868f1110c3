"""The quality meter on real documents: clean traffic, then a fault in the stored KV, then none.

    python benchmark/chunk/quality_meter.py --model DIR --data musique_100.json --json OUT

The engine of a scheduler in one process, with a model and without HTTP: prompts are offered to the meter as
a server offers them when they are complete, and it is idle behind each. Only what is checked is computed,
so that thousands of prompts take minutes. The fault shuffles K and V of every stored document among its
tokens. When reuse has stopped, documents that still differ are encoded again, as in a server.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from comparators.weights import load
from rag_load import Prompt, library

from canopy_chunks.meter import SERVED, STEPS, STOPPED
from canopy_chunks.server import engine as engines
from canopy_chunks.server.engine import ChunkEngine
from canopy_chunks.server.options import Options
from sglang_canopy.private_file import replace_file


class Run:
    """Prompts of one tenant, and what the meter says after each."""

    def __init__(self, engine: ChunkEngine, lib: Any, args: argparse.Namespace) -> None:
        self.engine, self.library, self.args = engine, lib, args
        self.rows: list[dict[str, Any]] = []
        self.begun = time.monotonic()

    def offer(self, prompt: Prompt) -> None:
        """A prompt is complete; then the scheduler is idle."""
        said = SimpleNamespace(custom_params={"canopy_chunks": prompt.bounds})
        req = SimpleNamespace(
            origin_input_ids=prompt.ids, extra_key=None, cache_salt=None, sampling_params=said,
            return_logprob=False, logprob_start_len=-1,
        )  # fmt: skip
        request = self.engine.new_request(req)
        assert request is not None
        stored = all(k.tier is not None for k in self.engine.library.resolve(request))
        request.fused = self.engine.may_fuse(req, request) and stored
        self.engine.offer_check(req, request)
        if not stored:
            request.fused = True  # so that nothing is taken from a pool
            self.engine.encode_missing(req, request, torch.arange(len(prompt.ids)))
        while self.engine.has_idle_work:
            self.engine.work_when_idle()

    def until(self, traffic: str, end: int | None, most: int) -> None:
        """Prompts until the tenant is at step ``end``, at most so many; a row at each step."""
        before = self.engine.watch.meter.step(None)
        for asked in range(1, most + 1):
            self.offer(self.library.prompt(self.args.chunks))
            step = self.engine.watch.meter.step(None)
            if step != before or step == end or asked == most:
                self.note(traffic, asked, step)
            before = step
            if step == end:
                return

    def note(self, traffic: str, asked: int, step: int) -> None:
        meter = self.engine.watch.meter
        row = {"traffic": traffic, "prompts": asked, "step": STEPS[step]}
        row |= {"checked": meter.checked, "differed": meter.differed}
        self.rows.append({**row, "seconds": round(time.monotonic() - self.begun)})
        print(json.dumps(self.rows[-1]), flush=True)
        if self.args.json:
            settings = {k: str(v) for k, v in vars(self.args).items() if k not in ("json", "model")}
            found = {"settings": {**settings, "data": self.args.data.name}, "rows": self.rows}
            replace_file(self.args.json, json.dumps(found, indent=1) + "\n")


def shuffle(engine: ChunkEngine) -> None:
    """The fault."""
    for tier in engine.library.store._tiers:
        for entry in tier.entries.values():
            order = torch.randperm(len(entry.chunk))  # type: ignore[arg-type]
            for kv in (entry.chunk.raw_k, entry.chunk.v):  # type: ignore[union-attr]
                kv[:] = kv[:, order].clone()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True)
    add("--data", type=Path, required=True, help="a file of questions")
    add("--documents", type=int, default=12)
    add("--tokens", type=int, default=64, help="of a document")
    add("--chunks", type=int, default=3, help="documents a prompt")
    add("--encode", default="prefix")
    add("--clean", type=int, default=2000, help="prompts before the fault")
    add("--most", type=int, default=1000, help="prompts with the fault, and after it")
    add("--json", type=Path)
    args = parser.parse_args()
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    lib = library(tokenizer, args.data, args.documents, args.tokens, 0.8, 0)
    model = load(args.model, torch.float32, "cpu")
    runner = SimpleNamespace(attn_backend=SimpleNamespace(canopy_plan=None))
    with mock.patch.object(engines.model_view, "served_model", return_value=model):
        engine = ChunkEngine(runner, Options(encode=args.encode), tokenizer)
    run = Run(engine, lib, args)
    run.until("clean", None, args.clean)
    shuffle(engine)
    run.until("shuffled KV", STOPPED, args.most)
    run.until("encoded again as it is found", SERVED, args.most)


if __name__ == "__main__":
    main()
