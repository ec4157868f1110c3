"""SGLang's own scheduler with a small model in one process, fed request by request.

Without HTTP and a second process, the caller controls the order of events."""

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import Any

KV_TOKENS = 4096
ANSWER_TIMEOUT_S = 120.0
"""Time limit of a batch of answers. A count of loop iterations would not bound it: storage threads run
beside them."""
OVERLAP_FLAG = "--overlap"
"""Argument in place of SGLang's ``--disable-overlap-schedule``."""


class SteppedScheduler:
    """SGLang's scheduler, which the caller steps; with its overlapped loop if ``arguments`` has `OVERLAP_FLAG`."""

    def __init__(self, model: Path, arguments: list[str], kv_tokens: int = KV_TOKENS) -> None:
        from sglang.srt.managers import scheduler as scheduler_module
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.server_args import PortArgs, prepare_server_args

        from launch_server import cpu_arguments

        flags = cpu_arguments(model, kv_tokens=kv_tokens, dtype="float32")
        if not (model / "model.safetensors").exists():
            flags += ["--load-format", "dummy"]
        is_overlapped = OVERLAP_FLAG in arguments
        if is_overlapped:
            flags.remove("--disable-overlap-schedule")
        flags += ["--skip-tokenizer-init", *(flag for flag in arguments if flag != OVERLAP_FLAG)]
        server_args = prepare_server_args(flags)
        scheduler_module.publish(
            server_args,
            role="scheduler",
            ranks=scheduler_module.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0),
        )
        self.scheduler = scheduler_module.Scheduler(server_args, PortArgs.init_new(server_args))
        self.overlap_loop = OverlapLoop(self.scheduler) if is_overlapped else None
        self._fed_requests = 0

    def feed(
        self,
        ids: list[int],
        new_tokens: int,
        priority: int | None = None,
        time_s: float | None = None,
        **fields: Any,
    ) -> Any:
        """Queue a request that arrives at time ``time_s`` (default: now) and return its ``Req``.
        ``fields``: other fields of SGLang's message. ``None``: the queue refused it."""
        from support.receiver import message_of

        self._fed_requests += 1
        time_s = time.monotonic() if time_s is None else time_s
        canopy_stamp = {"time": time_s, **fields.pop("stamp", {})}
        custom_params = {"canopy": canopy_stamp, **fields.pop("custom", {})}
        rid = fields.pop("rid", f"r{self._fed_requests}")
        sampling_fields = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
        request = message_of(custom_params, ids, rid, sampling_fields, priority=priority, **fields)
        request.sampling_params.normalize(None)
        self.scheduler.process_input_requests([request])
        queued = [req for req in self.scheduler.waiting_queue if req.rid == request.rid]
        return queued[-1] if queued else None

    def abort(self, rid: str) -> None:
        """Act as the client of ``rid`` that disconnects."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.process_input_requests([AbortReq(rid=rid)])

    def step(self) -> None:
        """Run one iteration of SGLang's ``event_loop_normal``, or of ``event_loop_overlap``."""
        if self.overlap_loop is not None:
            self.overlap_loop.iterate()
            return
        scheduler = self.scheduler
        plan = scheduler.get_next_batch_to_run(
            running_batch=scheduler.running_batch, last_batch=scheduler.last_batch
        )
        scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        if batch:
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        scheduler.last_batch = batch

    def serve(self, reqs: list[Any]) -> list[Any]:
        """Step until all are answered; return them in that order. Raises AssertionError after the time limit."""
        answered: list[Any] = []
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            self.step()
            answered += [req for req in reqs if req.finished() and req not in answered]
            if len(answered) == len(reqs):
                return answered
        raise AssertionError(f"{len(reqs) - len(answered)} requests were never answered")

    def settle(self) -> None:
        """Step until no batch runs and the storage neither reads nor writes."""
        cache, deadline = self.scheduler.tree_cache, time.monotonic() + ANSWER_TIMEOUT_S
        for _ in range(3):  # the last batch leaves
            self.step()
        while (cache.ongoing_prefetch or cache.ongoing_backup) and time.monotonic() < deadline:
            self.step()
        assert not cache.ongoing_prefetch
        assert not cache.ongoing_backup


class _FirstResultQueue:
    """The scheduler's ``result_queue``: the loop assigns a new one at its start, which is ignored."""

    def __get__(self, scheduler: Any, owner: type | None = None) -> Any:
        return scheduler.__dict__["result_queue"]

    def __set__(self, scheduler: Any, queue: deque[Any]) -> None:
        scheduler.__dict__.setdefault("result_queue", queue)


class OverlapLoop:
    """SGLang's overlapped event loop, run one iteration at a time in this thread.

    The loop launches a batch before it processes the result of the batch before, so that requests
    arrive, leave and are preempted while results are in flight. SGLang's hook of scripted
    schedulers is called once in each iteration; here it ends the loop after that iteration."""

    def __init__(self, scheduler: Any) -> None:
        if not scheduler.enable_overlap:
            raise AssertionError("SGLang has turned the overlap off")
        fields = {"result_queue": _FirstResultQueue()}
        scheduler.__class__ = type("Overlapped", (scheduler.__class__,), fields)
        scheduler._war_barrier_enabled = False  # run_event_loop sets it, for CUDA alone
        scheduler.idle_sleeper = None
        receiver = scheduler.request_receiver
        scheduler.request_receiver = dataclasses.replace(receiver, scripted_scheduler_hook=self)
        self.scheduler = scheduler
        self.iterations_with_result_in_flight = 0
        """Iterations at whose end a result was in flight."""

    def iterate(self) -> None:
        """Run one iteration. A paused engine only receives."""
        self.scheduler.gracefully_exit = False
        self.scheduler.event_loop_overlap()
        self.iterations_with_result_in_flight += bool(self.scheduler.result_queue)

    def step(self) -> None:
        """End the loop after the iteration that has begun: SGLang calls this as it receives requests."""
        self.scheduler.gracefully_exit = True
