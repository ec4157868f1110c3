"""Judge of ``canopy advise`` on breaks of prefixes, with logs of one seeded break each.

    python benchmark/advise/breaks.py --data RUNS --prose TEXTS --out benchmark/advise/results/breaks.json

RUNS: a folder of agents' runs (``seed_breaks.runs_of``); TEXTS: a folder of long texts. A break counts if it costs
at least 1 % of the prompt tokens, measured as the tokens that an endless cache misses more than on
the clean log.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import seed_breaks as seeds
from seed_independent import INDEPENDENT

from canopy_lab.advise.breaks.finder import Breaks, Finder
from canopy_lab.trace.openai_log import parse

SETS = {"made_with": seeds.KINDS, "unseen": seeds.UNSEEN, "independent": INDEPENDENT}
ALL = {name: kind for kinds in SETS.values() for name, kind in kinds.items()}
RATES = (0.1, 0.5, 1.0)
MIN_LOST = 0.01


def find(log: Sequence[seeds.Row], named: bool = True) -> tuple[Breaks, float]:
    """Return the finder's result for a log, and its CPU seconds (reading included)."""
    finder, begin = Finder(), time.process_time()
    for number, row in enumerate(log):
        for prompt in parse(seeds.without_labels(row, named=named), number):
            finder.add(prompt)
    return finder.found(), time.process_time() - begin


def baseline(log: list[seeds.Row], name: str, seed: int) -> list[seeds.Row]:
    """The log that a break is measured against: with the constant in place, if it has one."""
    kind = ALL[name]
    return log if kind.only_bad else seeds.seeded(log, name, "head", 0.0, seed, ALL)


def missed(found: Breaks) -> int:
    return found.tokens - found.cached_tokens


def judge(
    log: list[seeds.Row],
    clean: Breaks,
    names: Sequence[str],
    seed: int,
    rates: Sequence[float],
    named: bool,
) -> list[dict[str, Any]]:
    """One row for each seeded log."""
    rows = []
    known = {(one.place, one.kind) for one in clean.findings}
    for name in names:
        kind = ALL[name]
        base = baseline(log, name, seed)
        before = clean if base is log else find(base, named)[0]
        depths = seeds.DEPTHS if kind.app is None else ("middle",)
        for depth in depths:
            for rate in rates:
                found, spent = find(seeds.seeded(log, name, depth, rate, seed, ALL), named)
                right = [
                    f for f in found.findings if f.place == kind.place and f.kind in kind.names
                ]
                wrong = [
                    f for f in found.findings if f not in right and (f.place, f.kind) not in known
                ]
                lost = max(0, missed(found) - missed(before))
                rows.append(
                    {
                        "kind": name, "depth": depth, "rate": rate, "seed": seed,
                        "worth": lost >= MIN_LOST * found.tokens,
                        "placed": any(f.place == kind.place for f in found.findings),
                        "right": bool(right), "wrong": len(wrong),
                        "lost": lost, "said": sum(f.tokens for f in right),
                        "found": [[f.place, f.kind, f.tokens] for f in found.findings],
                        "requests": found.requests, "cpu_s": spent,
                    }
                )  # fmt: skip
    return rows


def total(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Recall, precision and tokens over ``rows``."""
    worth = [r for r in rows if r["worth"]]
    right, wrong = sum(r["right"] for r in rows), sum(r["wrong"] for r in rows)
    return {
        "logs": len(rows),
        "worth": len(worth),
        "recall": sum(r["right"] for r in worth) / max(len(worth), 1),
        "placed": sum(r["placed"] for r in worth) / max(len(worth), 1),
        "precision": right / max(right + wrong, 1),
        "said_of_lost": sum(r["said"] for r in worth) / max(sum(r["lost"] for r in worth), 1),
        "requests_per_cpu_s": sum(r["requests"] for r in rows) / max(sum(r["cpu_s"] for r in rows), 1e-9),
    }  # fmt: skip


def by_kind(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: total([r for r in rows if r["kind"] == name]) for name in dict.fromkeys(r["kind"] for r in rows)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prose", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--sessions", type=int, default=18)
    parser.add_argument("--rates", default=",".join(map(str, RATES)))
    parser.add_argument("--unnamed", action="store_true", help="logs without conversation and user")
    parser.add_argument("--kinds", help="only these, by comma")
    args = parser.parse_args()
    runs, prose = seeds.runs_of(args.data), seeds.prose_of(args.prose)
    rates, named = [float(r) for r in args.rates.split(",")], not args.unnamed
    only = set(args.kinds.split(",")) if args.kinds else None
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in SETS}
    clean_findings = clean_requests = 0
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        log = seeds.clean_log(runs, prose, seed, args.sessions)
        clean, _ = find(log, named)
        clean_findings += len(clean.findings)
        clean_requests += clean.requests
        for set_name, kinds in SETS.items():
            names = [name for name in kinds if only is None or name in only]
            rows[set_name] += judge(log, clean, names, seed, rates, named)
    result = {
        "runs": len(runs), "seeds": args.seeds, "first_seed": args.first_seed, "sessions": args.sessions, "rates": rates, "named": named,
        "clean": {"logs": args.seeds, "requests": clean_requests, "findings": clean_findings},
        "sets": {name: {"total": total(one), "kinds": by_kind(one)} for name, one in rows.items()},
    }  # fmt: skip
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, one in result["sets"].items():
        print(name, json.dumps(one["total"]))
        for kind, row in one["kinds"].items():
            print(f"  {kind:22} worth {row['worth']:2} placed {row['placed']:.2f} recall {row['recall']:.2f} precision {row['precision']:.2f} said/lost {row['said_of_lost']:.2f}")  # fmt: skip
    print("clean", result["clean"])
    if only is not None:
        for one in rows.values():
            for row in one:
                print(
                    row["kind"], row["depth"], row["rate"], row["worth"], row["lost"], row["found"]
                )


if __name__ == "__main__":
    main()
