"""Agents in a closed loop at SGLang's own scheduler with a real model, on a clock of its own.

    OMP_NUM_THREADS=1 PYTHONPATH=test python benchmark/latency/stepped_agents.py --data DIR --model DIR \\
        --out FILE --kv-tokens 2048 --sessions 10 --slices 6 \\
        --arm "lru=" --arm "again=" --arm "auto=--radix-eviction auto"

The sessions, slices and figures of ``agent_slices.py``, the engine and clock of ``stepped.py``: one
process an arm steps the scheduler, and its clock is its CPU time plus the time that it would have been
idle. A turn arrives after the previous answer and the think time. The scheduler receives the messages
of agents' clients and of the HTTP process: the session, that the answer calls a tool, and the time once
a second.
"""

from __future__ import annotations

import argparse
import heapq
import json
import shlex
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from agent_slices import links_of, plan, table
from slices import turn
from stepped import TICK_S, Arm, Engine

from canopy_lab.live.replay.options import session_offsets_s
from canopy_lab.trace.materialise import Materialiser, Planned


class AgentEngine(Engine):
    """The scheduler of an arm, with requests of agents."""

    def serve(self, part: Sequence[Any], due: Sequence[float]) -> dict[str, Any]:
        """Serve a slice. ``part``: for each request its prompt, tokens to generate, stamp, and the (request,
        think time in s) that follow it; ``due``: due time of a session's first turn, else NaN."""
        began, clock = self.clock(), self.clock
        todo = [(at, number) for number, at in enumerate(due) if at == at]
        heapq.heapify(todo)
        open_: dict[int, Any] = {}
        when: dict[int, float] = {}
        first: dict[int, float] = {}
        done: dict[int, float] = {}
        cached: dict[int, int] = {}
        told, area = 0.0, 0.0
        while todo or open_:
            now = clock() - began
            if not open_:
                clock.wait_until(began + todo[0][0])
                now = clock() - began
            while todo and todo[0][0] <= now:
                at, number = heapq.heappop(todo)
                ids, new, stamp, _ = part[number]
                when[number] = at
                open_[number] = self._engine.feed(ids, new, at=began + at, stamp=stamp)
            if now - told >= TICK_S:
                told = now
                self._tell_time(began + now)
            waiting = len(self._scheduler.waiting_queue)
            self._step()
            before, now = now, clock() - began
            area += waiting * (now - before)
            for number, req in list(open_.items()):
                if number not in first and len(req.output_ids):
                    first[number] = now - when[number]
                if req.finished():
                    del open_[number]
                    done[number], cached[number] = now, req.cached_tokens
                    for following, think in part[number][3]:
                        heapq.heappush(todo, (now + think, following))
        numbers = range(len(part))
        seconds = clock() - began
        return {
            "seconds": seconds,
            "waiting": area / seconds,
            "ttft_s": [round(first[n], 4) for n in numbers],
            "done_s": [round(done[n] - when[0], 4) for n in numbers],
            "due_s": [round(when[n] - when[0], 4) for n in numbers],
            "cached_tokens": [cached[n] for n in numbers],
            "gate": self._of_policies("gate"),
            "whatif": self._of_policies("meter"),
        }


def work(pipe: Any, model: Path, arguments: list[str], kv_tokens: int) -> None:
    """A process of one arm."""
    import os

    import torch

    torch.set_num_threads(1)
    engine = AgentEngine(model, arguments, kv_tokens)
    pipe.send("ready")
    with torch.no_grad():
        while (asked := pipe.recv()) is not None:
            pipe.send(engine.serve(*asked))
    os._exit(0)  # SGLang's threads would keep the process


def asked_of(
    args: argparse.Namespace, made: Materialiser, part: Sequence[Planned], seed: int
) -> tuple[list[Any], list[float]]:
    """Return the arguments of ``AgentEngine.serve`` for a slice."""
    links = links_of(args, part)
    follows: list[list[tuple[int, float]]] = [[] for _ in part]
    due = [float("nan")] * len(part)
    offsets = session_offsets_s(links, args.rate, seed)
    for number, before in enumerate(links.before):
        if before < 0:
            due[number] = offsets[number]
        else:
            follows[before].append((number, links.think_s[number]))
    asked = []
    for number, planned in enumerate(part):
        record = planned.request
        stamp = {
            "conversation": record.conversation,
            "category": record.category,
            "turn": record.turn,
            "stop": record.stop or "tool",
        }
        ids = list(made.prompt(planned))
        asked.append((ids, max(1, planned.output_tokens), stamp, follows[number]))
    return asked, due


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with agentic_coding/")
    add("--out", type=Path, required=True, help="result, JSON")
    add("--model", type=Path, required=True, help="model directory")
    add("--arm", type=Arm, action="append", required=True, dest="arms", help="NAME=ARGUMENTS")
    add("--common", type=shlex.split, default=["--chunked-prefill-size", "128"])
    add("--kv-tokens", type=int, default=2048)
    add("--sessions", type=int, default=10, help="of a slice")
    add("--slices", type=int, default=6)
    add("--turns", type=int, default=12, help="most of a session")
    add("--context", type=int, default=600, help="most tokens of a session, scaled")
    add("--rate", type=float, default=3600.0, help="sessions an hour")
    add("--think-cap", type=float, default=20.0, help="longest time to think, s, before scaling")
    add("--think-scale", type=float, default=0.05)
    add("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    add("--vocab-size", type=int, default=1 << 15)
    add("--seed", type=int, default=1, help="of the overlay")
    args = parser.parse_args()
    for arm in args.arms:
        arm.start(args, work)
        arm.ready()
    texts, parts = plan(args)
    names = ("common", "kv_tokens", "sessions", "slices", "turns", "context", "rate", "seed")
    about = {name: getattr(args, name) for name in names}
    made: dict[str, Any] = {"about": about, "slices": {arm.name: [] for arm in args.arms}}
    for number, part in enumerate(parts):
        asked, due = asked_of(args, texts, part, number)
        tokens = [p.prompt_tokens for p in part]
        for arm in turn(args.arms, number):
            found = arm.serve(asked, due)
            found |= {"prompt_tokens": tokens, "first": links_of(args, part).first}
            if number:  # the first slice is the warm-up
                made["slices"][arm.name].append(found)
        if number:
            args.out.write_text(json.dumps(made))
            print("\n".join(table(made)), flush=True)
            print(
                {n: round(rows[-1]["waiting"], 1) for n, rows in made["slices"].items()}, flush=True
            )
    for arm in args.arms:
        arm.process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
