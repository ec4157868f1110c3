"""Agents on a real server, with hints by themselves and without: hits and steps.

    python benchmark/clients/served.py --out benchmark/clients/results/served.json

Agents work side by side on tasks of a few steps. Each step's answer is a real tool call in the
server's own format (forced, for the model has random weights), the client library reads it, the tool
takes its time, and its result is part of the next prompt. The loop is plain ``openai``; arms:

- ``without``: the loop as it is;
- ``hints``: the same inside ``Session``, with ``http_client()``;
- ``placebo``: the same hints, of another agent: each reaches the wrong conversation.

In every round each arm has the same tasks and begins with an empty cache, the arms in turns on one
server. An arm is a tenant: what is said in one makes the server doubt no other. One command, about six
minutes. ``--rows FILE`` prints the table again.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from openai import OpenAI
from tokenizers import Tokenizer

from sglang_canopy.clients.http import http_client
from sglang_canopy.clients.session import Session
from sglang_canopy.clients.tool_times import ToolTimes
from sglang_canopy.wire.stamp import FORCE_OUTPUT

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import Server, cpu_arguments, free_port, serving
from tiny_model import write_tiny_model

ARMS = ("without", "hints", "placebo")
AGENTS = 12
TOOL_S = {"search": 1.0, "run_tests": 5.0, "build": 15.0}
"""Mean seconds; each call takes 0.8 to 1.2 times as long."""
STEPS = (4, 10)
"""Of a task, from and to."""
WORDS = {"system": 150, "task": 150, "result": 80}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in TOOL_S
]  # fmt: skip


class Others(Session):
    """Says of another agent's conversation what is true of its own."""

    running: list[Session] = []
    draw = random.Random(0)

    def _hint(self, **said: Any) -> None:
        mine, self.name = self.name, self.draw.choice(self.running).name
        super()._hint(**said)
        self.name = mine


def session(arm: str, url: str, times: ToolTimes) -> AbstractContextManager[Any]:
    if arm == "without":
        return nullcontext()
    if arm == "hints":
        return Session(url, tool_times=times, tenant=_tenant(arm))
    made = Others(url, tool_times=times, tenant=_tenant(arm))
    Others.running = [*Others.running[-AGENTS:], made]
    return made


def _tenant(arm: str) -> dict[str, str]:
    """Each arm is a tenant: no false hint of one makes the server doubt another."""
    return {"cache_salt": f"the-arm-{arm}"}


def text(draw: random.Random, words: int) -> str:
    return " ".join(draw.choice(_WORDS) for _ in range(words))


_WORDS = [f"{a}{b}" for a in ("leaf", "tree", "root", "path", "page") for b in ("", "s", "ing", "ed", "er")]  # fmt: skip


def tasks(seed: int, agent: int) -> Iterator[tuple[str, list[str], random.Random]]:
    """What one agent works on: a text, the tools that it will call, and a source of chance."""
    number = 0
    while True:
        draw = random.Random(f"{seed} {agent} {number}")
        tools = [draw.choice(list(TOOL_S)) for _ in range(draw.randint(*STEPS))]
        yield f"Task {seed}-{agent}-{number}. {text(draw, WORDS['task'])}", tools, draw
        number += 1


def work(
    client: OpenAI,
    agent: int,
    seed: int,
    arm: str,
    around: Callable[[], AbstractContextManager[Any]],
    tokens: Callable[[str], list[int]],
    until: float,
    steps: list[dict[str, Any]],
) -> None:
    """One agent, task after task."""
    system = "You are an agent. " + text(random.Random(seed), WORDS["system"])
    for task, tools, draw in tasks(seed, agent):
        messages: list[Any] = [
            {"role": "system", "content": system},
            {"role": "user", "content": task},
        ]
        with around():
            for tool in (*tools, None):
                if time.monotonic() >= until:
                    return
                said = "I am done." if tool is None else _call(tool)
                began = time.monotonic()
                reply = client.chat.completions.create(
                    model="m",
                    messages=messages,
                    tools=TOOLS,
                    max_tokens=64,
                    extra_body={
                        **_tenant(arm),
                        "custom_params": {FORCE_OUTPUT: tokens(said)},
                    },
                )
                steps.append(_row(reply, time.monotonic() - began, tool))
                if tool is None:
                    break
                messages.append({"role": "assistant", "content": said})
                time.sleep(TOOL_S[tool] * draw.uniform(0.8, 1.2))
                messages.append({"role": "user", "content": text(draw, WORDS["result"])})


def _call(tool: str) -> str:
    return f'<tool_call>\n{{"name": "{tool}", "arguments": {{}}}}\n</tool_call>'


def _row(reply: Any, seconds: float, tool: str | None) -> dict[str, Any]:
    called = [call.function.name for call in reply.choices[0].message.tool_calls or ()]
    assert called == ([] if tool is None else [tool]), f"the server read {called}, not {tool}"
    details = reply.usage.prompt_tokens_details
    return {
        "prompt_tokens": reply.usage.prompt_tokens,
        "cached_tokens": details.cached_tokens if details else 0,
        "seconds": seconds,
    }


def measure(
    server: Server, arm: str, seed: int, encode: Callable[[str], list[int]], args: Any
) -> dict[str, Any]:
    """One arm, from an empty cache."""
    urllib.request.urlopen(f"{server.url}/flush_cache", data=b"", timeout=60).close()
    steps: list[dict[str, Any]] = []
    times = ToolTimes()
    client = OpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        timeout=120,
        http_client=http_client(),
    )
    until = time.monotonic() + args.seconds

    def around() -> AbstractContextManager[Any]:
        return session(arm, server.url, times)

    threads = [
        threading.Thread(target=work, args=(client, agent, seed, arm, around, encode, until, steps))
        for agent in range(AGENTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "arm": arm,
        "seed": seed,
        "seconds": args.seconds,
        "kv_tokens": args.kv_tokens,
        "agents": AGENTS,
        "steps": len(steps),
        "prompt_tokens": sum(step["prompt_tokens"] for step in steps),
        "cached_tokens": sum(step["cached_tokens"] for step in steps),
        "mean_s": statistics.fmean(step["seconds"] for step in steps),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | token hits, % | steps a minute | mean s a step |",
        "|---|---:|---:|---:|",
    ]
    for arm in ARMS:
        of = [r for r in rows if r["arm"] == arm]
        hits = [100 * r["cached_tokens"] / r["prompt_tokens"] for r in of]
        rate = statistics.fmean(60 * r["steps"] / r["seconds"] for r in of)
        mean_s = statistics.fmean(r["mean_s"] for r in of)
        each = ", ".join(f"{h:.1f}" for h in hits)
        lines.append(
            f"| {arm} | {statistics.fmean(hits):.1f} ({each}) | {rate:.1f} | {mean_s:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    root = Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path, help="rows of an earlier run: only the table")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kv-tokens", type=int, default=5000)
    parser.add_argument(
        "--tokenizer", type=Path, default=root / ".canopy/models/smollm2-135m-instruct"
    )
    args = parser.parse_args()
    if args.rows:
        print(table(json.loads(args.rows.read_text())))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        write_tiny_model(model, args.tokenizer)
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

        def ids_of(text: str) -> list[int]:
            return tokenizer.encode(text).ids

        flags = (
            *cpu_arguments(model, kv_tokens=args.kv_tokens, dtype="float32"),
            *(
                "--load-format",
                "dummy",
                "--radix-eviction",
                "wa",
                "--tool-call-parser",
                "qwen",
            ),
            "--canopy-enable-forced-output",
        )
        log = Path(folder) / "server.log"
        with serving(flags, log=log, port=free_port(), deadline_s=1200.0) as server:
            for number in range(args.rounds):
                for at in range(len(ARMS)):
                    arm = ARMS[(at + number) % len(ARMS)]
                    rows.append(measure(server, arm, number, ids_of, args))
                    print(rows[-1], flush=True)
                    if args.out:
                        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
