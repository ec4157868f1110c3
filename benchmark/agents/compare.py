"""Agents over HTTP: SGLang's settings and Canopy's ``auto``, from a cold start, every turn counted.

    python benchmark/agents/compare.py --out benchmark/agents/results/served
    python benchmark/agents/compare.py --out /tmp/one --regimes equal-4 --arms lru auto --repeats 1

An arm is one server: it starts, warms up with one request, is flushed, and receives all sessions of its
regime (``clients.py``). The scheduler has one core. Rows are added to OUT.json, each (regime, arm, repeat)
once, in turns; OUT.md has their medians.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import servers
from clients import SessionRun, SessionSizes, vocabulary

KIND = "served over HTTP"


@dataclass(frozen=True, slots=True)
class AgentRegime:
    """Sizes of a comparison. ``fit`` sessions of mean length fit on the device."""

    kv_tokens: int
    fit: int
    model: tuple[int, int]
    """Hidden size and layers: the price of a token."""
    sizes: SessionSizes


CHEAP, DEAR = (128, 2), (256, 2)
SHORT = SessionSizes(sessions=16, turns=6, system_tokens=400, result_tokens=200, pause_s=(0.2, 0.8))
LONG = SessionSizes(sessions=16, turns=4, system_tokens=2500, result_tokens=600, pause_s=(0.2, 0.8))
FIRST = SessionSizes(
    sessions=48, turns=8, system_tokens=1000, result_tokens=200, pause_s=(0.2, 1.0)
)
SLOW_TOOLS = (2.0, 4.0)


def _change_sizes(sizes: SessionSizes, **changes: Any) -> SessionSizes:
    return dataclasses.replace(sizes, **changes)


REGIMES: Mapping[str, AgentRegime] = {
    "dear-4": AgentRegime(16_000, 4, DEAR, LONG),
    "equal-4": AgentRegime(5_000, 4, DEAR, SHORT),
    "cheap-4": AgentRegime(5_000, 4, CHEAP, _change_sizes(SHORT, pause_s=SLOW_TOOLS)),
    "people-4": AgentRegime(5_000, 4, DEAR, _change_sizes(SHORT, people=16)),
    "equal-16": AgentRegime(5_000, 4, DEAR, _change_sizes(SHORT, sessions=64, turns=4)),
    "cheap-16": AgentRegime(5_000, 4, CHEAP, _change_sizes(SHORT, sessions=64, pause_s=SLOW_TOOLS)),
    "dear-16": AgentRegime(16_000, 4, DEAR, _change_sizes(LONG, sessions=64)),
    "first table": AgentRegime(8_000, 4, CHEAP, FIRST),
}
"""``dear``: with the sessions that fit, recomputation takes longer than pauses. ``4``, ``16``: times what
fits. ``people``: as many people as agents. ``first table``: 48 agents, 380 prompts of 1,700 tokens."""

Arguments = tuple[str, ...]
LRU: Arguments = ("--radix-eviction", "lru")
AUTO: Arguments = ("--radix-eviction", "auto")


def host(ratio: int) -> Arguments:
    write_back = ("--hicache-write-policy", "write_back")
    return ("--enable-hierarchical-cache", "--hicache-ratio", str(ratio), *write_back)


SHORTEST: Arguments = (*LRU, "--schedule-policy", "shortest-prefill-first")
BY_CLIENT = "sessions capped by the client"
ARMS: Mapping[str, Arguments] = {
    "lru": LRU,
    "lru again": LRU,
    "shortest-prefill-first": SHORTEST,
    "auto": AUTO,
    BY_CLIENT: LRU,
    "lru, host 6x": (*LRU, *host(6)),
    "auto, host 6x": (*AUTO, *host(6)),
    "lpm": (*LRU, "--schedule-policy", "lpm"),
    "requests capped": (*LRU, "--max-running-requests", "FIT"),
    "shortest-prefill-first, host 6x": (*SHORTEST, *host(6)),
    "lru, host 2x": (*LRU, *host(2)),
    "auto, host 2x": (*AUTO, *host(2)),
    "auto and the session gate": (*AUTO, "--canopy-session-gate", "auto"),
}
"""Name -> arguments. ``lru again`` is the placebo. ``host 2x``: host memory of twice the device's KV."""


def measure(arm: str, regime: AgentRegime, folder: Path) -> dict[str, Any]:
    """Return the result of one arm."""
    model = servers.model(folder, *regime.model)
    arguments = [str(regime.fit) if word == "FIT" else word for word in ARMS[arm]]
    began = time.monotonic()
    with servers.start(model, regime.kv_tokens, arguments, folder / "server.log") as server:
        ready_s = time.monotonic() - began
        words, markers = vocabulary(model)
        run = SessionRun(server.url, regime.sizes, words, markers)
        if arm == BY_CLIENT:
            run.most_sessions = regime.fit
        warm_up = _change_sizes(regime.sizes, sessions=1, turns=1, people=0)
        SessionRun(server.url, warm_up, words, markers).run_sessions()
        servers.flush(server)
        processes = servers.Processes(server)
        before = processes.cpu_s()
        wall_s = run.run_sessions()
        cpu_s = {name: s - before[name] for name, s in processes.cpu_s().items()}
        auto = None
        if "auto" in arm:
            auto = servers.get(f"{server.url}/canopy/status")["auto"]
    return {**summary(run, wall_s), "cpu_s": _rounded(cpu_s), "ready_s": round(ready_s, 1), "load": round(os.getloadavg()[0], 1), "auto": auto}  # fmt: skip


def result(arm: str, regime: AgentRegime, folder: Path) -> dict[str, Any]:
    """Return the result of one arm, or the error with which its server ended."""
    try:
        return measure(arm, regime, folder)
    except OSError:
        log = (folder / "server.log").read_text(errors="replace")
        errors = [line for line in log.splitlines() if "Error" in line]
        if not errors:
            raise
        return {"server_ended": errors[-1]}


def summary(run: SessionRun, wall_s: float) -> dict[str, Any]:
    """Return what a user and an operator of a run notice."""
    agents = [row for row in run.rows if row["client_kind"] == "agent"]
    sessions = sum(row["turn"] == run.sizes.turns - 1 for row in agents)
    people = [row for row in run.rows if row["client_kind"] == "person"]
    all_s = max(wall_s, *(row["end_s"] for row in run.rows))
    prompt, cached = (sum(row[key] for row in run.rows) for key in ("prompt_tokens", "cached_tokens"))  # fmt: skip
    return {
        "wall_s": round(wall_s, 1),
        "sessions_per_hour": round(3600 * sessions / wall_s),
        "turns_per_s": round(len(agents) / wall_s, 2),
        "all_turns_per_s": round(len(run.rows) / all_s, 2),
        "people_turns": len(people),
        "first_ttft_s": spread([row["ttft_s"] for row in agents if row["turn"] == 0]),
        "later_ttft_s": spread([row["ttft_s"] for row in agents if row["turn"]]),
        "people_ttft_s": spread([row["ttft_s"] for row in people]),
        "prompt_tokens": prompt,
        "hit_percent": round(100 * cached / prompt, 1),
        "turns": len(agents),
        "turns_with_a_call": sum(row["tool_calls"] > 0 for row in agents),
        "errors": run.errors,
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return _rounded({"mean": statistics.fmean(ordered), "p99": p99})


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows' medians in Markdown: all arms in a line, then a table for each regime.

    *Relative*: ``wall_s`` over the HTTP process's CPU seconds. That process does the same work for the
    same turns, so the machine's changes of speed cancel; compare it only where no people take part.
    """
    rows = [_with_relative(row) for row in rows]
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    shown = ("wall_s",), ("all_turns_per_s",), ("later_ttft_s", "mean"), ("cpu_s", "scheduler")
    origin = "Made by `compare.py`; medians of the runs. In brackets: relative to the HTTP process."
    lines = ["# Agents over HTTP", "", origin, ""]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines += [f"| | {' | '.join(arms)} |", "|---|" + "---:|" * len(arms)]
    for path in shown:
        for regime in regimes:
            runs_of = (
                [r for r in rows if (r["regime"], r["arm"]) == (regime, arm)] for arm in arms
            )
            cells = (_with_bracket(runs, path) for runs in runs_of)
            lines.append(f"| {regime}, {' '.join(path)} | {' | '.join(cells)} |")
    for regime in regimes:
        regime_rows = [row for row in rows if row["regime"] == regime]
        sizes = ", ".join(f"{key}: {value}" for key, value in regime_rows[0]["sizes"].items())
        lines += ["", f"## {regime}", "", sizes, ""]
        lines += ["| arm | runs | all answered after, s | relative | sessions/h | turns/s | with people's | first turns' TTFT, mean, s | P99 | later turns' | P99 | people's | P99 | scheduler's CPU, s | tokens hit, % |"]  # fmt: skip
        lines += ["|---|" + "---:|" * 14]
        paths = [("wall_s",), ("relative",)]
        paths += [("sessions_per_hour",), ("turns_per_s",), ("all_turns_per_s",)]
        paths += [(f"{who}_ttft_s", x) for who in ("first", "later", "people") for x in ("mean", "p99")]  # fmt: skip
        paths += [("cpu_s", "scheduler"), ("hit_percent",)]
        for arm in dict.fromkeys(row["arm"] for row in regime_rows):
            runs = [row for row in regime_rows if row["arm"] == arm]
            cells = (median(runs, *path) for path in paths)
            lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
        ended = [f"{row['arm']}: the server ended with {row['server_ended']}" for row in regime_rows if "server_ended" in row]  # fmt: skip
        lines += ["", *ended] if ended else []
    return "\n".join([*lines, ""])


def _with_bracket(runs: Sequence[Any], path: Sequence[str]) -> str:
    """Return a median; that of ``wall_s`` with its relative value in brackets."""
    value = median(runs, *path)
    return f"{value} ({median(runs, 'relative')})" if path[0] == "wall_s" else value


def _with_relative(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "server_ended" in row:
        return row
    return {**row, "relative": round(row["wall_s"] / row["cpu_s"]["http"], 2)}


def median(runs: Sequence[Any], *path: str) -> str:
    """Return the median of a value in each run that has it, ``-`` if none has."""
    values = []
    for value in runs:
        for key in path:
            value = None if value is None else value.get(key)
        values += [] if value is None else [value]
    return f"{statistics.median(values):g}" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="path without a suffix")
    parser.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the servers
    file = options.out.with_suffix(".json")
    rows = json.loads(file.read_text())["rows"] if file.exists() else []
    measured = {(row["regime"], row["arm"], row["repeat"]) for row in rows}
    with tempfile.TemporaryDirectory() as scratch:
        servers.prepare(Path(scratch))
        for repeat in range(options.repeats):
            for name in options.regimes:
                regime = REGIMES[name]
                for arm in options.arms if repeat % 2 == 0 else options.arms[::-1]:
                    if (name, arm, repeat) in measured:
                        continue
                    row = {
                        "regime": name,
                        "arm": arm,
                        "repeat": repeat,
                        **result(arm, regime, Path(scratch)),
                        "arguments": ARMS[arm],
                        "sizes": {
                            **dataclasses.asdict(regime.sizes),
                            "kv_tokens": regime.kv_tokens,
                            "fit": regime.fit,
                            "model": regime.model,
                        },
                    }
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    file.write_text(json.dumps({"kind": KIND, "rows": rows}, indent=1) + "\n")
                    options.out.with_suffix(".md").write_text(table(rows))


if __name__ == "__main__":
    main()
