"""Cost of ``auto`` where it cannot help, against SGLang without Canopy, by paired turns.

    python benchmark/agents/no_gain.py --out benchmark/agents/results/no_gain
    python benchmark/agents/no_gain.py --out /tmp/one --work short --rounds 4

Three servers are up at once, one is loaded at a time: SGLang, SGLang again (the placebo) and ``auto``. A
round gives each the same number of requests of one kind. A ratio is the median over rounds of a server's
value divided by SGLang's in the same round, with a bootstrapped 95 % interval. CPU seconds are read from
/proc. ``start`` measures the time to ready and the CPU seconds of servers started as new processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent))

import servers
from clients import vocabulary
from compare import AUTO, RESULT_KIND

ARMS = {"SGLang": (servers.PLAIN,), "SGLang again": (servers.PLAIN,), "auto": AUTO}
KV_TOKENS = 400_000
TURN_TOKENS, CHAT_TURNS = 40, 8
IDLE_S = 15.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one kind: how many a server receives in a round, and how many at a time."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    prompt_kind: str = "unique"
    """``unique``, ``same`` (every prompt is one text) or ``chat`` (turns of conversations)."""


WORKLOADS: Mapping[str, Workload] = {
    "unique prompts": Workload(16, 8, 500, 32),
    "short": Workload(96, 16, 30, 8),
    "decode": Workload(16, 16, 50, 200),
    "chat that fits": Workload(32, 8, 60, 24, "chat"),
    "all hits": Workload(64, 8, 500, 8, "same"),
}
IDLE, START = "idle", "start"
METRICS = ("scheduler_ms", "cpu_ms", "ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "rate")  # fmt: skip


@dataclass(slots=True)
class ServerRound:
    """One round of one server."""

    url: str
    workload: Workload
    words: Sequence[str]
    rng: random.Random
    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)

    async def send_all(self, http: aiohttp.ClientSession) -> None:
        remaining = list(range(self.workload.requests))
        is_chat = self.workload.prompt_kind == "chat"

        async def client() -> None:
            texts: list[str] = []
            while remaining:
                remaining.pop()
                if is_chat:
                    tokens = TURN_TOKENS if texts else self.workload.prompt_tokens
                    texts = [*texts, self.draw_text(tokens)]
                    texts = texts[-1:] if len(texts) > CHAT_TURNS else texts
                    await self.ask(http, " ".join(texts))
                else:
                    await self.ask(http, self.draw_text(self.workload.prompt_tokens))

        await asyncio.gather(*(client() for _ in range(self.workload.concurrency)))

    def draw_text(self, tokens: int) -> str:
        rng = random.Random(0) if self.workload.prompt_kind == "same" else self.rng
        return " ".join(rng.choices(self.words, k=tokens))

    async def ask(self, http: aiohttp.ClientSession, prompt: str) -> None:
        body = {"model": "m", "prompt": prompt, "max_tokens": self.workload.output_tokens, "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
        start_s, token_times_s = time.perf_counter(), []
        async with http.post(f"{self.url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    token_times_s.append(time.perf_counter())
        self.ttft_s.append(token_times_s[0] - start_s)
        self.gaps_s += [after - before for before, after in itertools.pairwise(token_times_s)]


async def measure_round(
    server_round: ServerRound, processes: servers.Processes, http: Any
) -> dict[str, float]:
    """Send a round's requests and return its metrics; CPU milliseconds are per request."""
    cpu_before_s, start_s = processes.cpu_s(), time.perf_counter()
    await server_round.send_all(http)
    wall_s = time.perf_counter() - start_s
    await asyncio.sleep(0.1)  # the server frees the last answers
    cpu_ms = {name: 1000 * (s - cpu_before_s[name]) for name, s in processes.cpu_s().items()}
    requests = server_round.workload.requests
    return {
        "scheduler_ms": cpu_ms["scheduler"] / requests,
        "cpu_ms": sum(cpu_ms.values()) / requests,
        "ttft_p50_ms": 1000 * statistics.median(server_round.ttft_s),
        "ttft_p99_ms": 1000 * quantile(server_round.ttft_s, 0.99),
        "gap_p50_ms": 1000 * statistics.median(server_round.gaps_s),
        "gap_p99_ms": 1000 * quantile(server_round.gaps_s, 0.99),
        "rate": requests / wall_s,
    }


def quantile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def paired_ratio(arm_values: Sequence[float], sglang_values: Sequence[float]) -> list[float]:
    """Return the median of paired ratios, and its bootstrapped 95 % interval."""
    ratios = [arm / sglang for arm, sglang in zip(arm_values, sglang_values, strict=True)]
    rng = random.Random(1)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(1000))
    return [round(x, 3) for x in (statistics.median(ratios), medians[25], medians[974])]


async def compare_arms(
    workload: Workload, urls: Mapping[str, str], processes: Mapping[str, servers.Processes],
    words: Sequence[str], rounds: int,
) -> dict[str, Any]:  # fmt: skip
    """Return each arm's medians and ratios."""
    rows_of_arm: dict[str, list[dict[str, float]]] = {arm: [] for arm in urls}
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        for number in range(-1, rounds):  # the first one warms up
            for arm in urls if number % 2 else reversed(urls):
                server_round = ServerRound(
                    urls[arm], workload, words, random.Random(f"{arm} {number} {workload}")
                )
                metrics = await measure_round(server_round, processes[arm], http)
                if number >= 0:
                    rows_of_arm[arm].append(metrics)
    base_arm = next(iter(urls))
    return {
        arm: {
            "medians": {m: round(statistics.median(row[m] for row in rows), 3) for m in METRICS},
            "ratios": {m: paired_ratio([r[m] for r in rows], [r[m] for r in rows_of_arm[base_arm]]) for m in METRICS},
        }
        for arm, rows in rows_of_arm.items()
    }  # fmt: skip


def measure_idle(processes: Mapping[str, servers.Processes]) -> dict[str, Any]:
    """Return each arm's CPU milliseconds in a second without requests, and its resident MB."""
    cpu_before_s = {arm: p.cpu_s() for arm, p in processes.items()}
    time.sleep(IDLE_S)
    return {
        arm: {
            "cpu_ms_per_s": {n: round(1000 * (s - cpu_before_s[arm][n]) / IDLE_S, 2) for n, s in p.cpu_s().items()},
            "rss_mb": p.rss_mb(),
        }
        for arm, p in processes.items()
    }  # fmt: skip


def measure_starts(model: Path, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the medians of seconds to ready and of CPU seconds till then, in turns."""
    starts_of_arm: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ("SGLang", "auto")}
    for number in range(rounds):
        for arm in starts_of_arm if number % 2 else reversed(starts_of_arm):
            launch_s = time.monotonic()
            with servers.serve_model(
                model, KV_TOKENS, ARMS[arm], folder / "start.log", start=subprocess.Popen
            ) as server:
                ready_s = time.monotonic() - launch_s
                cpu_s = sum(servers.Processes(server).cpu_s().values())
                starts_of_arm[arm].append((ready_s, cpu_s))
    return {
        arm: dict(zip(("ready_s", "cpu_s"), (round(statistics.median(v), 2) for v in zip(*rows))))
        for arm, rows in starts_of_arm.items()
    }


def markdown_table(report: Mapping[str, Any]) -> str:
    """Return the report in Markdown."""
    lines = ["# Cost of `auto` where it cannot help", "", "Made by `no_gain.py`; ratios to SGLang without Canopy, median [95 %].", ""]  # fmt: skip
    lines += [f"| work | server | {' | '.join(METRICS)} |", f"|---|---|{'---:|' * len(METRICS)}"]
    for work in filter(WORKLOADS.__contains__, report):
        for arm, row in list(report[work].items())[1:]:
            cells = ("{:.2f} [{:.2f}, {:.2f}]".format(*row["ratios"][m]) for m in METRICS)
            lines.append(f"| {work} | {arm} | {' | '.join(cells)} |")
    for name in (IDLE, START):
        for arm, row in report.get(name, {}).items():
            lines += ["", f"{name}, {arm}: {json.dumps(row)}"]
    return "\n".join(lines) + "\n"


def write_report(out: Path, report: Mapping[str, Any]) -> None:
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown_table(report))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    parser.add_argument("--work", nargs="+", choices=[*WORKLOADS, IDLE, START])
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    parts = options.work or [*WORKLOADS, IDLE, START]
    report: dict[str, Any] = {"kind": RESULT_KIND, "rounds": options.rounds}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        servers.prepare(Path(scratch))
        model = servers.write_model(Path(scratch), 128, 2)
        words, _ = vocabulary(model)
        if START in parts:
            report[START] = measure_starts(model, Path(scratch), 3)
        urls, processes = {}, {}
        for number, (arm, arguments) in enumerate(ARMS.items()):
            log = Path(scratch) / f"{number}.log"
            server = stack.enter_context(servers.serve_model(model, KV_TOKENS, arguments, log))
            urls[arm], processes[arm] = server.url, servers.Processes(server)
        for name in filter(parts.__contains__, WORKLOADS):
            report[name] = asyncio.run(
                compare_arms(WORKLOADS[name], urls, processes, words, options.rounds)
            )
            print(name, json.dumps({a: r["ratios"] for a, r in report[name].items()}), flush=True)
            write_report(options.out, report)
        if IDLE in parts:
            report[IDLE] = measure_idle(processes)
        write_report(options.out, report)


if __name__ == "__main__":
    main()
