"""What `wa` would win from signals in a request that it does not read, each against its placebo.

    python benchmark/eviction/signals.py --data DIR --out OUT
    pip download --no-deps chitchat-dataset==0.9.0 && unzip chitchat_dataset-*.whl -d CHATS
    python benchmark/eviction/signals.py --traces people --data CHATS --out OUT

A signal is a small label that a server could see in a request and its answer: the kinds of content
in the last message and in the answer, the model, how much a turn adds, a history that was
compacted, the tool that is called. `wa` refines its categories by it, next to the stop reason
(*coarse*) or after all else (*fine*), so it learns how long each tool takes to return. The placebo
has the same labels, shuffled among the requests: their frequencies stay, their meaning goes.
Writes OUT/signals.json and OUT/signals.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import statistics
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from people import FAREWELL, people
from tqdm import tqdm

from canopy_lab.report.table import text_table
from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.sim.requests import to_requests
from canopy_lab.trace.overlay import overlay
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.request.farewell import FLAG, SUFFIX
from sglang_canopy.request.tools import label_of
from sglang_canopy.reuse.categories import features

Trace = Sequence[TraceRequest]
WINDOW_S = 7200.0
CONVERSATIONS = 60
CHARS = 64
"""Characters of a block of the runs with full text: about 16 tokens."""
COPIES, STARTS_S = 10, 1200.0
"""Of each run with full text, so that there is competition: started at random within so long."""
_COMMAND = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def answer(trace: Trace) -> list[str]:
    """Kinds of content in the answer."""
    return ["+".join(r.output_types) or "-" for r in trace]


def message(trace: Trace) -> list[str]:
    """Kinds of content in what the turn adds."""
    return ["+".join(r.input_types) or "-" for r in trace]


def model(trace: Trace) -> list[str]:
    """The model asked."""
    return [r.model or "-" for r in trace]


def added(trace: Trace) -> list[str]:
    """Tokens that the turn adds to the one before it, by powers of four: a pasted document."""
    return [
        "first" if p is None else f"4^{max(0, r.input_tokens - p.input_tokens).bit_length() // 2}"
        for r, p in _before(trace)
    ]


def compaction(trace: Trace) -> list[str]:
    """Whether the turn left more than half of the prompt before it."""
    labels = []
    for r, p in _before(trace):
        half = 0 if p is None else len(p.blocks) // 2
        kept = p is None or (len(r.blocks) >= half and r.blocks[:half] == p.blocks[:half])
        labels.append("kept" if kept else "left")
    return labels


def sub_agents(trace: Trace) -> list[str]:
    """Whether the pending call starts sub-agents: the one tool whose name the archive gives away."""
    labels, last = ["-"] * len(trace), {}
    for index, r in enumerate(trace):
        if r.conversation is not None and "/" in r.conversation and r.turn == 1:
            parent = last.get(r.conversation.rpartition("/")[0])
            if parent is not None:
                labels[parent] = "task"
        last[r.conversation] = index
    return labels


def together(trace: Trace) -> list[str]:
    """Answer and message."""
    return [f"{a} {b}" for a, b in zip(answer(trace), message(trace), strict=True)]


AGENTIC: dict[str, Callable[[Trace], list[str]]] = {
    "answer": answer,
    "message": message,
    "model": model,
    "added": added,
    "compaction": compaction,
    "sub-agents": sub_agents,
    "answer and message": together,
}


def agentic(data: Path, seed: int) -> tuple[list[TraceRequest], dict[str, list[str]]]:
    """The first two hours of an overlay, and the labels of each signal."""
    archive = data / "agentic_coding" / "traces_500.tar.xz"
    trace = [r for r in overlay(archive, CONVERSATIONS, WINDOW_S, seed) if r.time_s <= WINDOW_S]
    return trace, {name: of(trace) for name, of in AGENTIC.items()}


def text_runs(data: Path, seed: int) -> tuple[list[TraceRequest], dict[str, list[str]]]:
    """Agent runs with their full text, ten times each with a text of their own. A shell command is
    the call, its first word the tool's name."""
    draw = random.Random(seed)
    made: list[tuple[TraceRequest, dict[str, str]]] = []
    for run, entries in _texts(data / "agent_text_miniswe.tar.xz"):
        for copy in range(COPIES):
            start = draw.uniform(0, STARTS_S) - entries[0]["timestamp"] / 1e6
            name, ids = f"{run}-{copy}", {}
            for turn, entry in enumerate(entries, 1):
                text, commands = entry["input"], _COMMAND.findall(entry["output"])
                before = made[-1][0].input_tokens if turn > 1 else 0
                blocks, chain = [], hashlib.blake2b(name.encode(), digest_size=7)
                for at in range(0, len(text) - CHARS + 1, CHARS):
                    chain.update(text[at : at + CHARS].encode())
                    blocks.append(
                        ids.setdefault(chain.digest(), int.from_bytes(chain.digest(), "big"))
                    )
                words = (commands[-1].split() or ["-"]) if commands else ["none"]
                last = text[-400:]
                labels = {
                    "tool": words[0].rpartition("/")[2][:16],
                    "parallel calls": str(min(len(commands), 3)),
                    "chained commands": str(min(3, sum(c.count("&&") for c in commands))),
                    "failed": "failed" if re.search(r"rror|not found|No such", last) else "-",
                    "added": f"4^{max(0, len(text) // 4 - before).bit_length() // 2}",
                }
                made.append(
                    (
                        TraceRequest(
                            start + entry["timestamp"] / 1e6, max(1, len(text) // 4),
                            max(1, len(entry["output"]) // 4), tuple(blocks), CHARS // 4,
                            category="agent", turn=turn, conversation=name, user=name,
                            stop="tool" if commands else "end",
                            tool=label_of(words[0]) if commands else None,
                        ),
                        labels,
                    )
                )  # fmt: skip
    made.sort(key=lambda pair: pair[0].time_s)
    names = made[0][1]
    return [r for r, _ in made], {name: [labels[name] for _, labels in made] for name in names}


def chats(data: Path, seed: int) -> tuple[list[TraceRequest], dict[str, list[str]]]:
    """Conversations of people, and what their last messages tell."""
    return people(data / "chitchat_dataset" / "dataset.json", seed)


TRACES = {"agentic": agentic, "text": text_runs, "people": chats}
CAPACITIES = {"agentic": (0.05, 0.1), "text": (0.01, 0.02), "people": (0.02, 0.05)}


def refined(of_time: dict[float, str], coarse: bool) -> Policy:
    """`wa` that also refines by a signal, known by the request's time, which no two share."""
    policy: Any = make_policy("wa", {"max_categories": 1024})

    def categorise(tip: Any, request: Any) -> Any:
        gap = tip.own_gap_s
        names = features(request.category, request.stop, tip.turn, request.output_tokens, gap)
        at = 2 if coarse else len(names)
        names = (*names[:at], f"signal {of_time[request.time]}", *names[at:])
        return policy.model.categories.refine(names, request.tenant, request.time)

    policy.model._categorise = categorise
    return policy


def measure(
    data: Path, trace_name: str, seed: int, capacities: Sequence[float], only: Sequence[str]
) -> list[dict]:
    """All arms on one trace, or those of ``only`` some signals."""
    trace, signals = TRACES[trace_name](data, seed)
    times = [request.time for request in to_requests(trace)]
    distinct = distinct_blocks(trace)
    arms: list[tuple[str, str, Callable[[], Policy]]] = [
        ("lru", "", lambda: make_policy("lru")),
        ("wa", "", lambda: make_policy("wa", {"max_categories": 1024})),
    ]
    given_trace: dict[tuple[str, str], Trace] = {}
    for name, labels in signals.items():
        other = list(labels)
        random.Random(seed).shuffle(other)
        for kind, given in (("", labels), ("placebo", other)):
            of_time = dict(zip(times, given, strict=True))
            for coarse in (True, False):
                place = "coarse" if coarse else "fine"
                arms.append(
                    (name, f"{place} {kind}".strip(), lambda t=of_time, c=coarse: refined(t, c))
                )
        if name == "tool":
            given = {"max_categories": 1024, "categories": "tools"}
            row, others = 'tool, `"categories": "tools"`', [r.tool for r in trace]
            random.Random(seed).shuffle(others)
            given_trace[row, "fine placebo"] = [
                replace(r, tool=o) for r, o in zip(trace, others, strict=True)
            ]
            arms += [
                (row, f"fine {kind}".strip(), lambda g=given: make_policy("wa", g))
                for kind in ("", "placebo")
            ]
        if name == FAREWELL:
            for kind, marks in (("", labels), ("placebo", other)):
                row, arm = f"{name}, `{FLAG}`", f"coarse {kind}".strip()
                given_trace[row, arm] = [
                    replace(r, category=r.category + (SUFFIX if mark != "-" else ""))
                    for r, mark in zip(trace, marks, strict=True)
                ]
                arms.append((row, arm, lambda: make_policy("wa", {"max_categories": 1024})))
    rows = []
    for capacity in capacities:
        for name, arm, make in tqdm(arms, desc=f"{trace_name} {seed} {capacity:g}"):
            if only and name not in (*only, "lru", "wa"):
                continue
            requests = given_trace.get((name, arm), trace)
            result = simulate(requests, make(), round(distinct * capacity))
            rows.append(
                {
                    "trace": trace_name, "seed": seed, "capacity": capacity, "signal": name,
                    "arm": arm, "requests": len(trace), "blocks_hit": result.block_hit_ratio,
                    "labels": len(set(signals.get(name, ()))),
                }
            )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Points over `wa`, mean and by seed, of each signal and of its placebo."""
    lines = []
    for trace, capacity in dict.fromkeys((r["trace"], r["capacity"]) for r in rows):
        here = [r for r in rows if (r["trace"], r["capacity"]) == (trace, capacity)]
        base = {r["seed"]: r["blocks_hit"] for r in here if r["signal"] == "wa"}
        lru = statistics.mean(r["blocks_hit"] for r in here if r["signal"] == "lru")
        lines.append(f"\n{trace}, {capacity:.0%} of the distinct blocks, {here[0]['requests']} requests or so: "
                     f"`lru` {lru:.2%}, `wa` {statistics.mean(base.values()):.2%}\n")  # fmt: skip
        cells = []
        for signal in dict.fromkeys(r["signal"] for r in here if r["arm"]):
            cell = [signal]
            for arm in ("coarse", "coarse placebo", "fine", "fine placebo"):
                points = [
                    100 * (r["blocks_hit"] - base[r["seed"]])
                    for r in here
                    if (r["signal"], r["arm"]) == (signal, arm)
                ]
                each = " ".join(f"{p:+.2f}" for p in points)
                cell.append(f"{statistics.mean(points):+.2f} ({each})" if points else "")
            cells.append(cell)
        heads = ["signal", "beside the stop reason", "shuffled", "after all else", "shuffled"]
        lines.append(text_table(heads, cells))
    return "\n".join(lines)


def _before(trace: Trace) -> list[tuple[TraceRequest, TraceRequest | None]]:
    last: dict[str | None, TraceRequest] = {}
    pairs = []
    for r in trace:
        pairs.append((r, None if r.conversation is None else last.get(r.conversation)))
        last[r.conversation] = r
    return pairs


def _texts(archive: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    runs = []
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith(".jsonl"):
                entries = [json.loads(line) for line in file]
                runs.append((Path(member.name).stem, sorted(entries, key=lambda e: e["timestamp"])))
    return runs


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--traces", default="agentic,text")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--only", nargs="*", default=[], help="only these signals")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.traces.split(","):
        for seed in map(int, args.seeds.split(",")):
            rows += measure(args.data, name, seed, CAPACITIES[name], args.only)
            (args.out / "signals.json").write_text(json.dumps(rows, indent=1) + "\n")
    (args.out / "signals.md").write_text(table(rows) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
