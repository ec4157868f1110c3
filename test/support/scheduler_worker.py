"""SGLang's own scheduler with a small model in one process, fed request by request.

    cd test && python -m support.scheduler_worker MODEL ARGUMENT...

Without HTTP and a second process, the caller controls the order of events. Prints one JSON object (see
``answers``).
"""

import json
import os
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from support.overlapped import OVERLAP, Turns
from support.prompts import continuing_prompts, token_ids

KV_TOKENS = 4096
ANSWERED_WITHIN_S = 120.0
"""Seconds for a batch of answers. Turns are no measure: storage threads run beside them."""
REQUESTS = 18


def prompts(count: int, seed: int) -> list[list[int]]:
    return continuing_prompts(count, seed, most_shared=600)


class InProcess:
    """The scheduler, stepped by hand; with its overlapped loop if `OVERLAP` is among ``arguments``."""

    def __init__(self, model: Path, arguments: list[str], kv_tokens: int = KV_TOKENS) -> None:
        from sglang.srt.managers import scheduler as module
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.server_args import PortArgs, prepare_server_args

        from launch_server import cpu_arguments

        given = cpu_arguments(model, kv_tokens=kv_tokens, dtype="float32")
        if not (model / "model.safetensors").exists():
            given += ["--load-format", "dummy"]
        overlap = OVERLAP in arguments
        if overlap:
            given.remove("--disable-overlap-schedule")
        given += ["--skip-tokenizer-init", *(a for a in arguments if a != OVERLAP)]
        server_args = prepare_server_args(given)
        module.publish(
            server_args,
            role="scheduler",
            ranks=module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0),
        )
        self.scheduler = module.Scheduler(server_args, PortArgs.init_new(server_args))
        self.turns = Turns(self.scheduler) if overlap else None
        self._count = 0

    @property
    def fed(self) -> int:
        """Number of requests received."""
        return self._count

    def feed(
        self,
        ids: list[int],
        new: int,
        priority: int | None = None,
        at: float | None = None,
        **more: Any,
    ) -> Any:
        """Queue a request that arrives at time ``at`` (s; default: now) and return its ``Req``.
        ``more``: fields of SGLang's message."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._count += 1
        stamp = {
            "canopy": {"time": time.monotonic() if at is None else at, **more.pop("stamp", {})},
            **more.pop("custom", {}),
        }
        params = SamplingParams(
            temperature=0, max_new_tokens=new, ignore_eos=True, custom_params=stamp
        )
        params.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=more.pop("rid", f"r{self._count}"),
            input_text=None,
            input_ids=array("q", ids),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=params,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
            priority=priority,
            **more,
        )
        self.scheduler.process_input_requests([request])
        same = [req for req in self.scheduler.waiting_queue if req.rid == request.rid]
        return same[-1] if same else None

    def abort(self, rid: str) -> None:
        """The client of ``rid`` has hung up."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=rid)])

    def step(self) -> None:
        """One turn of SGLang's ``event_loop_normal``, or of ``event_loop_overlap``."""
        if self.turns is not None:
            self.turns.turn()
            return
        one = self.scheduler
        plan = one.get_next_batch_to_run(running_batch=one.running_batch, last_batch=one.last_batch)
        one.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            one.process_batch_result(batch, one.run_batch(batch))
        one.last_batch = batch

    def serve(self, reqs: list[Any]) -> list[Any]:
        """Step until all are answered; return them in the order of the answers."""
        done: list[Any] = []
        until = time.monotonic() + ANSWERED_WITHIN_S
        while time.monotonic() < until:
            self.step()
            done += [req for req in reqs if req.finished() and req not in done]
            if len(done) == len(reqs):
                return done
        raise AssertionError(f"{len(reqs) - len(done)} requests were never answered")

    def settle(self) -> None:
        """Step until no batch runs and the storage neither reads nor writes."""
        cache, until = self.scheduler.tree_cache, time.monotonic() + ANSWERED_WITHIN_S
        for _ in range(3):  # the last batch leaves
            self.step()
        while (cache.ongoing_prefetch or cache.ongoing_backup) and time.monotonic() < until:
            self.step()
        assert not cache.ongoing_prefetch
        assert not cache.ongoing_backup


def answers(engine: InProcess, priorities: bool) -> dict[str, Any]:
    """``equal``: answers are the same together and alone. ``kinds``: the order in which waiting short,
    long and urgent requests are answered."""
    asked = prompts(REQUESTS, seed=1)
    alone = []
    for ids in asked:
        engine.serve([req := engine.feed(ids, 4)])
        alone.append(list(req.output_ids))
    together = [engine.feed(ids, 4) for ids in asked]
    engine.serve(together)
    found: dict[str, Any] = {
        "equal": [list(req.output_ids) for req in together] == alone,
        "retracted": sum(req.retraction_count for req in together),
        "policy": engine.scheduler.policy.policy.value,
    }
    held = [engine.feed(token_ids(8, 900 + i), 12) for i in range(3)]
    for _ in range(4):
        engine.step()
    at = time.monotonic()
    kinds = {engine.feed(token_ids(700, seed), 1, at=at): "long" for seed in (1, 2, 3)}
    kinds |= {engine.feed(token_ids(20, seed), 1, at=at): "short" for seed in (4, 5, 6)}
    if priorities:
        kinds |= {engine.feed(token_ids(700, s), 1, 5, at): "urgent" for s in (7, 8)}
    # No further arrivals: time passes only with the steps.
    order = engine.serve([*kinds, *held])
    found["kinds"] = [kinds[req] for req in order if req in kinds]
    queue = engine.scheduler.tree_cache.canopy_queue
    found["fitted"] = list(queue.cost.coefficients)
    found["batches"] = queue.times.prefills
    engine.scheduler.tree_cache.sanity_check()
    return found


def run(arguments: list[str], work: Callable[[InProcess], dict[str, Any]]) -> None:
    """Run a worker: ``arguments`` are the model and the server's arguments. Print the result of ``work``.
    Does not return."""
    import torch

    engine = InProcess(Path(arguments[0]), arguments[1:])
    with torch.no_grad():
        found = work(engine)
    end_with(found)


def end_with(found: dict[str, Any]) -> NoReturn:
    """Print ``found`` and end this process, which SGLang's threads would keep."""
    print(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run(sys.argv[1:], lambda engine: answers(engine, "--enable-priority-scheduling" in sys.argv))
