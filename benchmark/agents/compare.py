"""Agents over HTTP: SGLang's settings and Canopy's ``auto``, from a cold start, every turn counted.

    python benchmark/agents/compare.py --out benchmark/agents/results/served
    python benchmark/agents/compare.py --out /tmp/one --regimes equal-4 --arms lru auto --repeats 1

An arm is one server: it starts, warms up with one request, is flushed, and receives all sessions of its
regime (``clients.py``). The scheduler has one core. Rows are added to OUT.json, each (regime, arm, repeat)
once, in turns; OUT.md has their medians.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import servers
from clients import SessionRun, SessionSizes, vocabulary

RESULT_KIND = "served over HTTP"


@dataclass(frozen=True, slots=True)
class AgentRegime:
    """Sizes of a comparison."""

    kv_tokens: int
    fitting_sessions: int
    """Sessions of mean length that fit on the device."""
    model_size: tuple[int, int]
    """Hidden size and layers: they set the time to compute a token."""
    sizes: SessionSizes


CHEAP_MODEL, DEAR_MODEL = (128, 2), (256, 2)
SHORT_TURNS = SessionSizes(16, turns=6, system_tokens=400, result_tokens=200, pause_s=(0.2, 0.8))
LONG_TURNS = SessionSizes(16, turns=4, system_tokens=2500, result_tokens=600, pause_s=(0.2, 0.8))
FIRST_TABLE = SessionSizes(48, turns=8, system_tokens=1000, result_tokens=200, pause_s=(0.2, 1.0))
SLOW_PAUSE_S = (2.0, 4.0)


REGIMES: Mapping[str, AgentRegime] = {
    "dear-4": AgentRegime(16_000, 4, DEAR_MODEL, LONG_TURNS),
    "equal-4": AgentRegime(5_000, 4, DEAR_MODEL, SHORT_TURNS),
    "cheap-4": AgentRegime(5_000, 4, CHEAP_MODEL, replace(SHORT_TURNS, pause_s=SLOW_PAUSE_S)),
    "people-4": AgentRegime(5_000, 4, DEAR_MODEL, replace(SHORT_TURNS, people=16)),
    "equal-16": AgentRegime(5_000, 4, DEAR_MODEL, replace(SHORT_TURNS, sessions=64, turns=4)),
    "cheap-16": AgentRegime(
        5_000, 4, CHEAP_MODEL, replace(SHORT_TURNS, sessions=64, pause_s=SLOW_PAUSE_S)
    ),
    "dear-16": AgentRegime(16_000, 4, DEAR_MODEL, replace(LONG_TURNS, sessions=64)),
    "first table": AgentRegime(8_000, 4, CHEAP_MODEL, FIRST_TABLE),
}
"""``dear``: to recompute the sessions that fit takes longer than a pause. ``4``, ``16``: sessions, as a
multiple of those that fit. ``people``: as many people as agents. ``first table``: 48 agents, 380 prompts
of 1,700 tokens."""

Arguments = tuple[str, ...]
LRU: Arguments = ("--radix-eviction", "lru")
AUTO: Arguments = ("--radix-eviction", "auto")


def host_tier(ratio: int) -> Arguments:
    write_back = ("--hicache-write-policy", "write_back")
    return ("--enable-hierarchical-cache", "--hicache-ratio", str(ratio), *write_back)


SHORTEST_PREFILL: Arguments = (*LRU, "--schedule-policy", "shortest-prefill-first")
BY_CLIENT = "sessions capped by the client"
ARMS: Mapping[str, Arguments] = {
    "lru": LRU,
    "lru again": LRU,
    "shortest-prefill-first": SHORTEST_PREFILL,
    "auto": AUTO,
    BY_CLIENT: LRU,
    "lru, host 6x": (*LRU, *host_tier(6)),
    "auto, host 6x": (*AUTO, *host_tier(6)),
    "lpm": (*LRU, "--schedule-policy", "lpm"),
    "requests capped": (*LRU, "--max-running-requests", "FIT"),
    "shortest-prefill-first, host 6x": (*SHORTEST_PREFILL, *host_tier(6)),
    "lru, host 2x": (*LRU, *host_tier(2)),
    "auto, host 2x": (*AUTO, *host_tier(2)),
    "auto and the session gate": (*AUTO, "--canopy-session-gate", "auto"),
}
"""Name -> arguments. ``lru again`` is the placebo. ``host 2x``: host memory of twice the device's KV."""


def measure(arm: str, regime: AgentRegime, folder: Path) -> dict[str, Any]:
    """Start an arm's server, run all sessions and return the figures."""
    model = servers.write_model(folder, *regime.model_size)
    arguments = [str(regime.fitting_sessions) if word == "FIT" else word for word in ARMS[arm]]
    launch_s = time.monotonic()
    with servers.serve_model(model, regime.kv_tokens, arguments, folder / "server.log") as server:
        ready_s = time.monotonic() - launch_s
        words, marker_ids = vocabulary(model)
        run = SessionRun(server.url, regime.sizes, words, marker_ids)
        if arm == BY_CLIENT:
            run.max_sessions = regime.fitting_sessions
        warm_up = replace(regime.sizes, sessions=1, turns=1, people=0)
        SessionRun(server.url, warm_up, words, marker_ids).run_sessions()
        servers.flush_cache(server)
        processes = servers.Processes(server)
        cpu_before_s = processes.cpu_s()
        wall_s = run.run_sessions()
        cpu_s = {name: s - cpu_before_s[name] for name, s in processes.cpu_s().items()}
        auto_status = None
        if "auto" in arm:
            auto_status = servers.get_json(f"{server.url}/canopy/status")["auto"]
    return {**summary(run, wall_s), "cpu_s": _rounded(cpu_s), "ready_s": round(ready_s, 1), "load": round(os.getloadavg()[0], 1), "auto": auto_status}  # fmt: skip


def measure_or_error(arm: str, regime: AgentRegime, folder: Path) -> dict[str, Any]:
    """Return the figures of an arm, or the error with which its server ended."""
    try:
        return measure(arm, regime, folder)
    except OSError:
        log = (folder / "server.log").read_text(errors="replace")
        errors = [line for line in log.splitlines() if "Error" in line]
        if not errors:
            raise
        return {"server_ended": errors[-1]}


def summary(run: SessionRun, wall_s: float) -> dict[str, Any]:
    """Return a run's throughput, times to first token, hits and errors."""
    agents = [row for row in run.rows if row["client_kind"] == "agent"]
    finished_sessions = sum(row["turn"] == run.sizes.turns - 1 for row in agents)
    people = [row for row in run.rows if row["client_kind"] == "person"]
    last_answer_s = max(wall_s, *(row["end_s"] for row in run.rows))
    prompt_tokens, cached_tokens = (sum(row[key] for row in run.rows) for key in ("prompt_tokens", "cached_tokens"))  # fmt: skip
    return {
        "wall_s": round(wall_s, 1),
        "sessions_per_hour": round(3600 * finished_sessions / wall_s),
        "turns_per_s": round(len(agents) / wall_s, 2),
        "all_turns_per_s": round(len(run.rows) / last_answer_s, 2),
        "people_turns": len(people),
        "first_ttft_s": mean_and_p99([row["ttft_s"] for row in agents if row["turn"] == 0]),
        "later_ttft_s": mean_and_p99([row["ttft_s"] for row in agents if row["turn"]]),
        "people_ttft_s": mean_and_p99([row["ttft_s"] for row in people]),
        "prompt_tokens": prompt_tokens,
        "hit_percent": round(100 * cached_tokens / prompt_tokens, 1),
        "turns": len(agents),
        "turns_with_a_call": sum(row["tool_calls"] > 0 for row in agents),
        "errors": run.errors,
    }


def mean_and_p99(ttft_s: Sequence[float]) -> dict[str, float] | None:
    if not ttft_s:
        return None
    ordered = sorted(ttft_s)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return _rounded({"mean": statistics.fmean(ordered), "p99": p99})


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 2) for name, value in values.items()}


def markdown_tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows' medians in Markdown: all arms in a line, then a table for each regime.

    *Relative*: ``wall_s`` over the HTTP process's CPU seconds. That process does the same work for the
    same turns, so the machine's changes of speed cancel; compare it only where no people take part.
    """
    rows = [_with_relative(row) for row in rows]
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    shown_keys = ("wall_s",), ("all_turns_per_s",), ("later_ttft_s", "mean"), ("cpu_s", "scheduler")
    origin = "Made by `compare.py`; medians of the runs. In brackets: relative to the HTTP process."
    lines = ["# Agents over HTTP", "", origin, ""]
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    lines += [f"| | {' | '.join(arms)} |", "|---|" + "---:|" * len(arms)]
    for keys in shown_keys:
        for regime in regimes:
            runs = ([r for r in rows if (r["regime"], r["arm"]) == (regime, arm)] for arm in arms)
            cells = (_with_bracket(arm_runs, keys) for arm_runs in runs)
            lines.append(f"| {regime}, {' '.join(keys)} | {' | '.join(cells)} |")
    for regime in regimes:
        regime_rows = [row for row in rows if row["regime"] == regime]
        sizes = ", ".join(f"{key}: {value}" for key, value in regime_rows[0]["sizes"].items())
        lines += ["", f"## {regime}", "", sizes, ""]
        lines += ["| arm | runs | all answered after, s | relative | sessions/h | turns/s | with people's | first turns' TTFT, mean, s | P99 | later turns' | P99 | people's | P99 | scheduler's CPU, s | tokens hit, % |"]  # fmt: skip
        lines += ["|---|" + "---:|" * 14]
        columns = [("wall_s",), ("relative",)]
        columns += [("sessions_per_hour",), ("turns_per_s",), ("all_turns_per_s",)]
        columns += [(f"{who}_ttft_s", x) for who in ("first", "later", "people") for x in ("mean", "p99")]  # fmt: skip
        columns += [("cpu_s", "scheduler"), ("hit_percent",)]
        for arm in dict.fromkeys(row["arm"] for row in regime_rows):
            runs = [row for row in regime_rows if row["arm"] == arm]
            cells = (median(runs, *keys) for keys in columns)
            lines.append(f"| {arm} | {len(runs)} | {' | '.join(cells)} |")
        ended = [f"{row['arm']}: the server ended with {row['server_ended']}" for row in regime_rows if "server_ended" in row]  # fmt: skip
        lines += ["", *ended] if ended else []
    return "\n".join([*lines, ""])


def _with_bracket(runs: Sequence[Any], keys: Sequence[str]) -> str:
    """Return a median; that of ``wall_s`` with its relative value in brackets."""
    value = median(runs, *keys)
    return f"{value} ({median(runs, 'relative')})" if keys[0] == "wall_s" else value


def _with_relative(row: Mapping[str, Any]) -> Mapping[str, Any]:
    if "server_ended" in row:
        return row
    return {**row, "relative": round(row["wall_s"] / row["cpu_s"]["http"], 2)}


def median(runs: Sequence[Any], *keys: str) -> str:
    """Return the median of a value in each run that has it, ``-`` if none has."""
    values = []
    for value in runs:
        for key in keys:
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
    json_file = options.out.with_suffix(".json")
    rows = json.loads(json_file.read_text())["rows"] if json_file.exists() else []
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
                        **measure_or_error(arm, regime, Path(scratch)),
                        "arguments": ARMS[arm],
                        "sizes": {
                            **asdict(regime.sizes),
                            "kv_tokens": regime.kv_tokens,
                            "fit": regime.fitting_sessions,
                            "model": regime.model_size,
                        },
                    }
                    print(json.dumps(row), flush=True)
                    rows.append(row)
                    report = {"kind": RESULT_KIND, "rows": rows}
                    json_file.write_text(json.dumps(report, indent=1) + "\n")
                    options.out.with_suffix(".md").write_text(markdown_tables(rows))


if __name__ == "__main__":
    main()
