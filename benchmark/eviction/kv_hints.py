"""Hits with actions of SGLang's ``kv_hints``: true ones, another conversation's, and random ones.

    python benchmark/eviction/kv_hints.py --data DIR --out benchmark/eviction/results/kv_hints.json

Each request carries an envelope, which the server's own reader (``request/kv_hints.py``) turns into
the fields of the simulated request. The truth is the trace's own future: ``release`` if the conversation
is over, else ``return`` with the time, and ``retain`` for ``retain_share`` times it. *Wrong* hints are
the same envelopes, shuffled among the requests. The placebo has random actions, with
times from the trace's distribution. ``obeys`` is LRU that evicts what any client released first, as SGLang's
session cache does with closed sessions. The share, and which actions are sent, were chosen on the Mooncake conversation
trace; the Mooncake synthetic trace and agents of users 4 and 8 judge.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from prefill_seconds import sessions

from canopy_lab.advise.sample import merged
from canopy_lab.sim.driver import distinct_blocks
from canopy_lab.sim.hindsight import make_hindsight
from canopy_lab.sim.hindsight.future import Future
from canopy_lab.sim.requests import continuations, to_requests
from canopy_lab.trace.open import open_trace
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.base import Policy
from sglang_canopy.policy.block_tree import RadixTree
from sglang_canopy.policy.ranked import NoOptions, RankedPolicy
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.records import Leaf
from sglang_canopy.request.kv_hints import read

CAPACITIES = (0.02, 0.05, 0.1)
JUDGES = ("synthetic", "agents of users 4 and 8")
TUNED = "conversation"
SENT: dict[str, tuple[str, ...]] = {
    "release": ("release",),
    "return": ("return",),
    "retain": ("retain",),
    "release, return": ("release", "return"),
    "release, retain": ("release", "retain"),
    "release, return, retain": ("release", "return", "retain"),
}
RETAIN_SHARES = (1.0, 1.5, 3.0)
"""``retain`` as a multiple of the time to the next request; tried on ``TUNED``."""
CHOSEN, RETAIN_SHARE = "release, return", 1.5
"""The best on ``TUNED``."""
SEEDS = (1, 2, 3)

Envelope = dict[str, Any]


class Obeys(RankedPolicy):
    """LRU that evicts released conversations first, of every sender."""

    name: ClassVar[str] = "obeys"
    Config: ClassVar[type] = NoOptions

    def rank(self, leaf: Leaf) -> tuple[bool, float]:
        return not leaf.over, leaf.last_access


def new_policy(name: str, trace: list[TraceRequest]) -> Policy:
    if name == "hindsight":
        return make_hindsight("belady", Future(trace))
    return Obeys(NoOptions()) if name == "obeys" else make_policy(name)


def traces(data: Path, names: Sequence[str]) -> Iterator[tuple[str, list[TraceRequest]]]:
    files = {TUNED: "conversation_first60.jsonl", "synthetic": "synthetic_trace.jsonl"}
    for name in names:
        if name in files:
            yield name, list(open_trace(data / "mooncake" / files[name], "mooncake"))
            continue
        yield name, [merged(r, 8) for r in sessions(data, 60, 1)]


def envelope(gap: float | None, sent: Sequence[str], retain_share: float) -> Envelope:
    """Return true actions. ``gap``: seconds to the next request, or ``None`` at the end."""
    actions = []
    if gap is None:
        wanted = {"release": {}}
    else:
        wanted = {"return": {"in_s": gap}, "retain": {"seconds": gap * retain_share}}
    for kind, payload in wanted.items():
        if kind in sent:
            action = {"action_type": f"kv.{kind}", "action_version": "1.0", "payload": payload}
            actions.append({"action_id": str(len(actions)), **action})
    return {"protocol_version": "1.0", "actions": actions}


def hinted(
    kind: str, trace: Sequence[TraceRequest], sent: Sequence[str], retain_share: float, seed: int
) -> list[Envelope]:
    """Return the envelope of each request."""
    draw = random.Random(seed)
    truth = continuations(trace)
    gaps = [gap for gap in truth if gap is not None]
    if kind == "wrong":
        draw.shuffle(truth)
    elif kind == "random":
        truth = [draw.choice(gaps) if draw.random() < 0.5 else None for _ in truth]
    return [envelope(gap, sent, retain_share) for gap in truth]


def hits(trace: list[TraceRequest], policy: Policy, share: float, given: list[Envelope]) -> float:
    """Serve the trace; return its block hits in %."""
    tree = RadixTree(policy, int(distinct_blocks(trace) * share), trace[0].block_tokens)
    found = asked = 0
    for request, sent in zip(to_requests(trace), given):
        fields, _ = read(sent, trusted=True)
        request.over = fields.get("over", False)
        request.return_in_s = fields.get("return_in_s")
        keep_s = fields.get("keep_s")
        request.keep_until = None if keep_s is None else request.time + keep_s
        found += tree.access(request)
        asked += len(request.path)
    return round(100 * found / asked, 3)


def runs(name: str) -> Iterator[tuple[str, str, str, float, int]]:
    """Policy, kind of hints, actions, retain share and seed of each run on a trace."""
    for policy in ("lru", "wa", "hindsight"):
        yield policy, "none", "", 0.0, 0
    for kind in ("true", "wrong", "random"):
        for seed in SEEDS if kind != "true" else SEEDS[:1]:
            yield "obeys", kind, "release", 0.0, seed
            for sent in SENT if kind == "true" else (CHOSEN, "release, return, retain"):
                every = name == TUNED and kind == "true" and "retain" in sent
                for retain_share in RETAIN_SHARES if every else (RETAIN_SHARE,):
                    yield "wa", kind, sent, retain_share, seed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the public traces")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--traces", nargs="+", choices=(TUNED, *JUDGES), default=(TUNED, *JUDGES))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, trace in traces(options.data, options.traces):
        for policy, kind, sent, retain_share, seed in runs(name):
            given = hinted(kind, trace, SENT.get(sent, ()), retain_share, seed)
            for share in CAPACITIES:
                made = new_policy(policy, trace)
                row = {
                    "trace": name,
                    "requests": len(trace),
                    "capacity": share,
                    "policy": policy,
                    "hints": kind,
                    "actions": sent,
                    "retain_share": retain_share,
                    "seed": seed,
                }
                rows.append({**row, "block_hits": hits(trace, made, share, given)})
                print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
