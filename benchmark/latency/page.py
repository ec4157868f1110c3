"""Numbers of docs/research/latency.md, of the guide to latency and of README."""

from __future__ import annotations

import itertools
import math
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from result_tables import ROOT, load, signed, table

sys.path.append(str(Path(__file__).parent))
from agent_slices import table as served_table
from paired import ratio

RESULTS = ROOT / "benchmark" / "latency" / "results" / "simulated"
LOADS = ("0.6", "0.8", "0.95", "1.1")
LOAD_HEADS = ("60 %", "80 %", "95 %", "110 %")
ROWS = {
    "conversation": ("conversation", "host0"),
    "synthetic": ("synthetic", "host0"),
    "agents": ("agentic", "host0"),
    "conversation, host of twice the device": ("conversation", "host2"),
    "agents, host of twice the device": ("agentic", "host2"),
}
ONE = "conversation-qwen2.5-7b-h100-0-host0.json"
"""Run with both SGLang's session-aware cache and `wa`."""


def runs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = load(str(path.relative_to(ROOT)))["runs"]
    return found


def change(paths: list[Path], arm: str, base: str, at: str, of: str = "mean") -> float:
    """Change of a TTFT against another arm in per cent, geometric mean over runs."""
    ratios = [known[f"{arm}@{at}"][of] / known[f"{base}@{at}"][of] for known in map(runs, paths)]
    return 100 * (geometric_mean(ratios) - 1)


def eviction() -> str:
    """`wa` against SGLang's defaults by load."""
    lines = []
    for label, (workload, host) in ROWS.items():
        paths = sorted(RESULTS.glob(f"{workload}-*-{host}.json"))
        end = "-host" if host == "host2" else ""
        changes = [change(paths, f"wa{end}", f"sglang{end}", at) for at in LOADS]
        lines.append([label, *(signed(change, 0) for change in changes)])
    return table(["`wa`", *LOAD_HEADS], lines, numbers=True)


def sessions() -> str:
    """README: SGLang's session-aware cache and `wa` at 80 % load, on the same run."""
    told, ours, kept = (
        change([RESULTS / ONE], arm, "sglang", "0.8") for arm in ("sessions", "wa", "sessions-kept")
    )
    return (
        f"mean TTFT {signed(told, 0)} % against {signed(ours, 0)} %, conversations at 80 % load; if "
        f"none does, {signed(kept, 0)} %"
    )


def crossing(points: list[tuple[float, float]], target: float) -> float:
    """Return the load at which the P99 reaches ``target``, by log-linear interpolation between runs.

    Return the lowest load if its P99 is above the target, the highest if no P99 is.
    """
    for (low, before), (high, after) in itertools.pairwise(points):
        if before > target:
            return low
        if after > target:
            share = math.log(target / before) / math.log(after / before)
            return low + share * (high - low)
    return points[-1][0]


def goodput(paths: list[Path], arm: str, base: str) -> float:
    """The load whose P99 is that of ``base`` at 80 %, over 80 %; geometric mean over runs."""
    found = []
    for known in map(runs, paths):
        points = [(float(at), known[f"{arm}@{at}"]["p99"]) for at in LOADS]
        found.append(crossing(points, known[f"{base}@0.8"]["p99"]) / 0.8)
    return geometric_mean(found)


AUTO_ROWS = {
    "conversation": ("conversation", "host0"),
    "synthetic": ("synthetic", "host0"),
    "conversation, pauses ten times as long": ("pauses", "host0"),
    "agents": ("agentic", "host0"),
    "chat beside agents": ("mix", "host0"),
    "conversation, host of twice the device": ("conversation", "host2"),
    "agents, host of twice the device": ("agentic", "host2"),
    "chat beside agents, host of twice the device": ("mix", "host2"),
}


def auto() -> str:
    """Compare `--radix-eviction auto` and the best of SGLang's orders with SGLang's defaults."""
    lines = []
    for label, (workload, host) in AUTO_ROWS.items():
        end, best = ("-host", "back-shortest-host") if host == "host2" else ("", "shortest")
        paths = sorted(RESULTS.glob(f"{workload}-*-{host}.json"))
        shown = [(f"auto{end}", at, "mean") for at in LOADS]
        shown += [(f"auto{end}", "0.95", "p99"), (best, "0.95", "mean")]
        cells = [signed(change(paths, arm, f"sglang{end}", at, of), 0) for arm, at, of in shown]
        lines.append([label, *cells, f"x{goodput(paths, f'auto{end}', f'sglang{end}'):.2f}"])
    heads = (*LOAD_HEADS, "P99, 95 %", "SGLang's order, 95 %", "goodput")
    return table(["mean TTFT, %", *heads], lines, numbers=True)


def gate() -> str:
    """The session gate's effect on `auto` with agents, at loads at which it changes a run."""
    found = []
    for profile, label in (
        ("qwen2.5-7b-h100", "Qwen2.5-7B"),
        ("llama-3.1-8b-h100", "Llama-3.1-8B"),
    ):
        paths = sorted(RESULTS.glob(f"agentic-{profile}-*-host0.json"))
        for at in LOADS:
            mean, p99 = (
                [signed(change([one], "auto", "wa-order", at, of), 0) for one in paths]
                for of in ("mean", "p99")
            )
            if {*mean, *p99} != {signed(0.0, 0)}:
                load = f"{100 * float(at):.0f} % load"
                found.append(f"{label}, {load}: {', '.join(mean)} % (P99 {', '.join(p99)} %)")
    return "; ".join(found)


CLIFF = {
    "none": "LRU",
    "footprint": "LRU and the gate",
    "Together": "**`auto`**",
    "host 2x, write_back": "LRU, host of twice the device, `write_back`",
}


def cliff() -> str:
    """Sessions an hour of agents past the cliff, with and without the gate."""
    known = {
        (run["arm"], run["seed"]): run["sessions_per_hour"]
        for run in load("benchmark/latency/results/gate.json")
        if run["offered_per_hour"] == 40
    }
    overlays = (1, 2, 3, 4)
    lines = [
        [label, *(f"{known[arm, seed]:.1f}" for seed in overlays)] for arm, label in CLIFF.items()
    ]
    return table(["overlay", *map(str, overlays)], lines, numbers=True)


STATIC = {
    "host0": ("sglang", "hrrn", "shortest", "sessions", "few", "shortest-few", "shortest-sessions"),
    "host2": ("sglang-host", "back-host", "back-shortest-host", "back-sessions-host"),
}
"""SGLang's own settings, by the size of the host tier."""


def best() -> str:
    """Compare `auto` with the setting of SGLang's that has the least mean TTFT, cell by cell."""
    lines = []
    for label, (workload, host) in AUTO_ROWS.items():
        paths = sorted(RESULTS.glob(f"{workload}-*-{host}.json"))
        tried = [arm for arm in STATIC[host] if all(f"{arm}@1.1" in runs(p) for p in paths)]
        auto = "auto-host" if host == "host2" else "auto"
        over = [max(change(paths, auto, arm, at) for arm in tried) for at in LOADS]
        lines.append([label, *(signed(one, 0) for one in over)])
    return table(["mean TTFT, %", *LOAD_HEADS], lines, numbers=True)


ORDERS = {
    "random": "random, the placebo",
    "lpm": "`lpm`",
    "hrrn": "`hrrn`",
    "shortest": "`shortest-prefill-first`, which shares steps",
    "order": "**`bounded-shortest`**",
}


def order() -> str:
    """Compare every order with first come, first served."""
    paths = sorted(RESULTS.glob("unseen-*.json"))
    shown = [*((at, "mean") for at in LOADS), ("0.95", "p50"), ("0.95", "p99"), ("0.95", "max")]
    lines = [
        [label, *(signed(change(paths, arm, "sglang", at, of), 0) for at, of in shown)]
        for arm, label in ORDERS.items()
    ]
    heads = ("median, 95 %", "P99, 95 %", "slowest, 95 %")
    return table(["mean TTFT, %", *LOAD_HEADS, *heads], lines, numbers=True)


def slowest() -> str:
    """The greatest slowest request of the runs, by load."""
    paths = sorted(RESULTS.glob("unseen-*.json"))
    return "; ".join(
        f"{ORDERS[arm].split(',')[0].strip('*')} "
        + ", ".join(
            signed(max(change([p], arm, "sglang", at, "max") for p in paths), 0) for at in LOADS
        )
        for arm in ("shortest", "order")
    )


def served_agents() -> str:
    """Agents at SGLang's scheduler: the placebo and `auto` against SGLang's defaults."""
    lines = []
    for name in load("benchmark/latency/results/served/agents-stepped.json"):
        rows = _agents(name)
        for arm, label in (("again", "placebo"), ("auto", "`auto`")):
            changes = [rows[arm][i].partition("(")[2].rstrip(")") for i in (0, 1, 2)]
            hits = f"{100 * float(rows[arm][4].partition(' ')[0]):.0f}"
            lines.append([f"{name}: {label}", *changes, hits])
    heads = ("all answered, %", "mean TTFT, %", "P99, %", "hits, %")
    return table(["", *heads], lines, numbers=True)


def _agents(run: str) -> dict[str, list[str]]:
    """Cells of a run of agents by arm: sums with their changes, and hits."""
    known = load("benchmark/latency/results/served/agents-stepped.json")[run]
    lines = list(served_table(known))[2:]
    return {
        arm: cells for arm, *cells in ([c.strip() for c in x.strip("|").split("|")] for x in lines)
    }


def _changed(cell: str) -> str:
    """`-34` from `152.32 (-34 [-36, -32])`."""
    return cell.partition("(")[2].split()[0].rstrip(")")


def cliff_short() -> str:
    """The guide's figures of the session gate."""
    auto = _agents("past the cliff, 2,048 tokens")["auto"]
    return (
        f"all sessions answered after {_changed(auto[0]).lstrip('-')} % less time, mean TTFT "
        f"{_changed(auto[1])} %, P99 {_changed(auto[2])} %"
    )


def _readme_hits(run: str) -> str:
    hits = (
        f"{100 * float(_agents(run)[arm][4].partition(' ')[0]):.0f} %" for arm in ("lru", "auto")
    )
    return " | ".join(hits)


def readme_cliff() -> str:
    """README: tokens that served agents hit if their KV does not fit."""
    return _readme_hits("past the cliff, 2,048 tokens")


def readme_room() -> str:
    """README: the same if it does."""
    return _readme_hits("8,192 tokens")


SERVED_ORDERS = {
    "fcfs": "first come, first served",
    "placebo": "the same again, the placebo",
    "hrrn": "`hrrn`",
    "shortest": "`shortest-prefill-first`",
    "ours": "`bounded-shortest`",
}


def _served_orders() -> dict[str, Any]:
    """Trace -> the run with all orders."""
    runs = load("benchmark/latency/results/served/order-stepped.json")
    return {
        run["about"]["trace"]: run["loads"][0] for run in runs if "fcfs" in run["about"]["arms"]
    }


def served_orders() -> str:
    """Orders of the queue at SGLang's scheduler, against first come, first served."""
    lines = []
    for trace, at in _served_orders().items():
        for arm, label in SERVED_ORDERS.items():
            cells = []
            for key in ("mean", "p99", "max"):
                if arm == "fcfs":
                    cells.append(f"{at['figures'][arm][key]:.2f} s")
                else:
                    value, low, high = (signed(100 * v, 0) for v in at["changes"][arm][key])
                    cells.append(f"{value} [{low}, {high}]")
            lines.append([f"{trace}, {100 * at['load']:.0f} %: {label}", *cells])
    return table(["%", "mean", "P99", "slowest"], lines, numbers=True)


def served_orders_short() -> str:
    """The guide's figures of the orders."""
    means = {
        arm: " and ".join(
            signed(100 * at["changes"][arm]["mean"][0], 0) for at in _served_orders().values()
        )
        for arm in ("ours", "shortest")
    }
    return (
        f"mean TTFT {means['ours']} %; SGLang's `shortest-prefill-first` {means['shortest']} %, "
        "without a bound"
    )


def copies() -> str:
    """Agents with a host tier over HTTP: `write_back` against SGLang's defaults."""
    slices = load("benchmark/latency/results/served/copies-closed-loop.json")["slices"]
    base, found = slices["lru"], []
    for arm, label in (("through", "`wa` alone"), ("back", "with `write_back`")):
        value, low, high = (
            signed(100 * v, 0)
            for v in ratio(
                [sum(one["ttft_s"]) for one in base], [sum(one["ttft_s"]) for one in slices[arm]], 1
            )
        )
        hits = sum(sum(one["cached_tokens"]) for one in slices[arm]) / sum(
            sum(one["prompt_tokens"]) for one in slices[arm]
        )
        found.append(f"{label} {value} % [{low}, {high}], {100 * hits:.0f} % of the tokens hit")
    return "mean TTFT " + "; ".join(found)


def copies_short() -> str:
    """The guide's figure of the host tier."""
    return "mean TTFT " + copies().rpartition("`write_back` ")[2].partition(" [")[0]


CHAT = {
    "lru": "SGLang's defaults",
    "again": "the same, the placebo",
    "auto": "`auto`",
    "shortest": "`shortest-prefill-first`",
}
TAIL = {
    "lru": "SGLang's defaults",
    "again": "the same, the placebo",
    "canopy-lru": "`canopy-lru`",
    "canopy-tlru": "`canopy-tlru`",
    "tlru": "SGLang's `tlru`",
}


def served_chat() -> str:
    """Conversations at SGLang's scheduler: `auto` against SGLang's defaults."""
    lines = []
    for at in load("benchmark/latency/results/served/chat-stepped.json")["loads"]:
        for arm, label in CHAT.items():
            first = [f"{100 * at['load']:.0f} %", label, str(at["waiting"][arm])]
            lines.append([*first, *arm_cells(at, arm, ("mean", "p99", "max"))])
    return table(["load", "", "wait", "mean TTFT", "P99", "slowest", "hits"], lines)


def served_tail() -> str:
    """The same for policies that aim at the tail."""
    (at,) = load("benchmark/latency/results/served/tail-stepped.json")["loads"]
    keys = ("mean", "p50", "p95", "p99")
    lines = [[label, *arm_cells(at, arm, keys)] for arm, label in TAIL.items()]
    return table(["", "mean TTFT", "P50", "P95", "P99", "hits"], lines)


def served_tail_hits() -> str:
    """T-LRU's figures in the layout of the paper."""
    (at,) = load("benchmark/latency/results/served/tail-stepped.json")["loads"]
    p95, median = (at["changes"]["canopy-tlru"][key][0] for key in ("p95", "p50"))
    shape = "The shape is the paper's" if p95 < 0 < median else "The shape is not the paper's"
    hits = [f"{100 * at['figures'][arm]['hits']:.0f} %" for arm in ("lru", "canopy-tlru")]
    return (
        f"{shape}: P95 {signed(100 * p95, 0)} %, median {signed(100 * median, 0)} %, hits {hits[0]} "
        f"without and {hits[1]} with it."
    )


def arm_cells(at: Any, arm: str, keys: tuple[str, ...]) -> list[str]:
    """Seconds of the first arm, changes in per cent with intervals of another; then its hits."""
    found, cells = at["figures"][arm], []
    for key in keys:
        if arm == "lru":
            cells.append(f"{found[key]:.2f} s")
        else:
            value, low, high = (signed(100 * v, 0) for v in at["changes"][arm][key])
            cells.append(f"{value} [{low}, {high}]")
    return [*cells, f"{100 * found['hits']:.0f} %"]


REFUSALS = {
    "judge": "synthetic",
    "other": "conversation, other window and profile",
    "tune": "conversation, which it was tuned on",
}
REFUSAL_ARMS = ("early refusal", "at random", "none", "max 16", "SGLang, max 32", "SGLang, none")


def refusal() -> str:
    """Goodput with early refusal, its placebo and SGLang's limit; calibration in the last column."""
    found, lines = load("benchmark/latency/results/refusal.json"), []
    for name, label in REFUSALS.items():
        for at in ("95%", "110%", "130%"):
            rows = [found[name].get(f"5 s, {at}: {arm}") for arm in REFUSAL_ARMS]
            if None in rows:
                continue
            first = rows[0]
            goodput = [f"{100 * row['goodput']:.0f}" for row in rows]
            goodput[0] = f"**{goodput[0]}**"
            rest = [f"{100 * first[key]:.0f}" for key in ("refused", "late", "covered")]
            lines.append([f"{label}, {at.rstrip('%')} %", *goodput, *rest])
    heads = ["early refusal", "at random", "none", "at most 16", "SGLang, at most 32", "SGLang"]
    return table(
        ["goodput, %", *heads, "refused, %", "late, %", "within the bound, %"], lines, numbers=True
    )


PARTS = {
    "cliff-short": cliff_short,
    "readme-cliff": readme_cliff,
    "readme-room": readme_room,
    "served-orders": served_orders,
    "served-orders-short": served_orders_short,
    "copies": copies,
    "copies-short": copies_short,
    "refusal": refusal,
    "served-chat": served_chat,
    "served-tail": served_tail,
    "served-tail-hits": served_tail_hits,
    "cliff": cliff,
    "served-agents": served_agents,
    "eviction": eviction,
    "sessions": sessions,
    "auto": auto,
    "best": best,
    "gate": gate,
    "order": order,
    "slowest": slowest,
}
