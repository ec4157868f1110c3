"""Hit rates of routing and eviction together, without a model: the gateways are real, workers are not.

    PYTHONPATH=GATEWAYS python benchmark/gateways/trees.py --overlay OVERLAY --out OUT

Each worker answers like an SGLang server, with the simulator's tree and a policy behind it: its cache
has the prompts that the gateway sent to it. So the gateway's own code decides the routing, and a run
takes a minute and no model. Requests are sent in the order of the trace, several at once, those of a
conversation one after the other. A worker answers one at a time, and later for more missed tokens.
(With one request at a time, a router that gives new prompts to the worker with the fewest requests
would always choose the first.) Prompts are text, a word a token; ``--as ids`` sends token ids. ``run.py`` does the same with servers.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from run import MODULES, ROUTINGS, Routing, gateway, in_order

from canopy_lab.report.table import text_table
from canopy_lab.sim.driver import distinct_blocks
from canopy_lab.sim.requests import to_requests
from canopy_lab.trace import TraceRequest, open_trace
from canopy_lab.trace.materialise import Materialiser, Planned, middle_tokens
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Request

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import free_port

ARMS = {
    "lru, whole nodes (SGLang)": ("lru", True),
    "lru": ("lru", False),
    "wa": ("wa", False),
}


ANSWER_S, TOKEN_S = 2e-3, 4e-7
"""Seconds of an answer, and of each missed token."""


class Worker:
    """Answers like a server; its cache is a tree of the simulator's."""

    def __init__(self, arm: str, capacity: int, requests: list[Request]) -> None:
        name, whole_nodes = ARMS[arm]
        size = requests[0].block_tokens
        self.tree = RadixTree(make_policy(name), capacity, size, whole_nodes=whole_nodes)
        self.requests = requests
        self.url = ""
        self._free = asyncio.Lock()
        self._now = 0.0

    async def start(self) -> web.AppRunner:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_get("/{path:.*}", self._get)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        port = free_port()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"
        return runner

    async def _get(self, request: web.Request) -> web.Response:
        if request.path.startswith("/v1/models"):
            models = [{"id": "tiny", "object": "model", "owned_by": "sglang"}]
            return web.json_response({"object": "list", "data": models})
        if request.path.startswith("/version"):
            return web.json_response({}, status=404)
        return web.json_response({"model_path": "tiny", "served_model_name": "tiny", "tp_size": 1})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked = self.requests[int(body["rid"].rpartition("_t")[2])]
        async with self._free:
            self._now = max(self._now, asked.time)  # concurrent requests may be out of order
            asked = dataclasses.replace(asked, time=self._now)
            found = min(self.tree.access(asked) * asked.block_tokens, asked.prompt_tokens)
            await asyncio.sleep(ANSWER_S + TOKEN_S * (asked.prompt_tokens - found))
        info = {"id": body["rid"], "finish_reason": {"type": "stop"}, "cached_tokens": found}
        info["prompt_tokens"] = asked.prompt_tokens
        details = {"prompt_tokens_details": {"cached_tokens": found}}
        usage = {"prompt_tokens": asked.prompt_tokens, "completion_tokens": 1, **details}
        choice = {"index": 0, "text": "", "finish_reason": "stop"}
        answer = {"id": body["rid"], "object": "text_completion", "created": 0, "model": "tiny"}
        return web.json_response(
            {**answer, "text": "", "meta_info": info, "choices": [choice], "usage": usage}
        )


async def replay(url: str, made: Materialiser, args: argparse.Namespace) -> list[tuple[int, int]]:
    """Send every request. Returns the tokens of each prompt, and its cached tokens."""
    async with aiohttp.ClientSession() as session:

        async def send(planned: Planned) -> tuple[int, int]:
            key = (planned.request.conversation or str(planned.ordinal)).replace("/", "-")
            body: dict[str, Any] = {"model": "tiny", "rid": f"{key}_t{planned.ordinal}"}
            tokens = made.prompt(planned)
            if args.sent_as == "ids":
                path = "/generate"
                body |= {"input_ids": tokens, "sampling_params": {"max_new_tokens": 1}}
            else:
                path = "/v1/completions"
                body |= {"prompt": " ".join(f"w{t}" for t in tokens), "max_tokens": 1}
            headers = {"x-smg-routing-key": key}
            async with session.post(url + path, json=body, headers=headers) as answer:
                if answer.status != 200:
                    raise SystemExit(f"{answer.status}: {(await answer.text())[:500]}")
                said = await answer.json()
            counts = said["meta_info"] if args.sent_as == "ids" else said["usage"]
            details = counts.get("prompt_tokens_details", counts)
            return counts["prompt_tokens"], details["cached_tokens"]

        return await in_order(made, args.max_concurrency, send)


async def measure(
    name: str, routing: Routing, arm: str, trace: list[TraceRequest], args: argparse.Namespace
) -> dict[str, Any]:
    """One replay through one gateway, to new workers with empty trees."""
    requests = list(to_requests(trace))
    capacity = max(1, round(distinct_blocks(trace) * args.capacity / args.workers))
    made = Materialiser(trace, middle_tokens(1 << 15), args.scale_lengths)
    workers = [Worker(arm, capacity, requests) for _ in range(args.workers)]
    runners = [await worker.start() for worker in workers]
    log = args.out / f"trees-{name}.log"
    started = gateway(name, [worker.url for worker in workers], routing.flags, log)
    # It waits for the gateway, which calls the workers: they must answer meanwhile.
    url = await asyncio.to_thread(started.__enter__)
    try:
        counts = await replay(url, made, args)
    finally:
        await asyncio.to_thread(started.__exit__, None, None, None)
        for runner in runners:
            await runner.cleanup()
    return {
        "gateway": name,
        "routing": routing.name,
        "policy": arm,
        "hit_rate": sum(found for _, found in counts) / sum(tokens for tokens, _ in counts),
        "requests": len(requests),
        "workers": args.workers,
        "capacity_blocks": capacity,
        "sent_as": args.sent_as,
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overlay", type=Path, required=True, help="of make_overlay.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gateways", default=",".join(MODULES))
    parser.add_argument("--capacity", type=float, default=0.1, help="all trees, of distinct blocks")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--scale-lengths", type=Fraction, default=Fraction(1, 64))
    parser.add_argument("--max-concurrency", type=int, default=4)
    parser.add_argument("--as", dest="sent_as", choices=("text", "ids"), default="text",
                        help="prompts to /v1/completions, or token ids to /generate")  # fmt: skip
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    trace = list(itertools.islice(open_trace(args.overlay, "agentic"), args.num_prompts))
    file = args.out / f"trees-{args.workers}-{args.capacity:g}-{args.sent_as}.json"
    results = json.loads(file.read_text()) if file.exists() else []
    done = {(r["gateway"], r["routing"], r["policy"]) for r in results}
    for name in args.gateways.split(","):
        for routing, arm in itertools.product(ROUTINGS[name], ARMS):
            if (name, routing.name, arm) not in done:
                results.append(asyncio.run(measure(name, routing, arm, trace, args)))
                file.write_text(json.dumps(results, indent=1) + "\n")
    rows = [[r["gateway"], r["routing"], r["policy"], f"{r['hit_rate']:.1%}"] for r in results]
    print(text_table(["gateway", "routing", "policy", "tokens hit"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
