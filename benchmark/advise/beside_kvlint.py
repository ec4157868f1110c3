"""Compare ``canopy advise`` with kvlint (PyPI) on the same seeded logs.

    python benchmark/advise/beside_kvlint.py ours --data RUNS --prose TEXTS --logs FOLDER
    KVLINT/bin/python benchmark/advise/beside_kvlint.py theirs --logs FOLDER --model DIR \
        --out benchmark/advise/results/kvlint.json

KVLINT: an environment of its own with ``pip install kvlint``. One log for each kind of break: half of the
requests, in the middle. A finding of kvlint is right if its rule stands for a kind that the break may be
called; it has no places, and takes no pictures. Rules that also fire on the clean log do not count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RULES = {
    "dynamic_time": {"time"},
    "dynamic_id": {"id", "counter", "number"},
    "key_order": {"key order", "tool order"},
    "user_in_system": {"user"},
    "volatile_fewshot": {"order", "text", "rewritten"},
    "whitespace_drift": {"white space"},
}
"""Rules that name a cause of a break, and its kinds."""


def ours(args: argparse.Namespace) -> None:
    """Write the logs, and the finder's answers to them."""
    sys.path.insert(0, str(Path(__file__).parent))
    import breaks
    import seed_breaks as seeds

    args.logs.mkdir(parents=True, exist_ok=True)
    log = seeds.clean_log(
        seeds.runs_of(args.data), seeds.prose_of(args.prose), args.seed, args.sessions
    )
    clean, rows = breaks.find(log)[0], []
    _write(args.logs / "clean.jsonl", log)
    for name, kind in breaks.SETS[args.set].items():
        made = seeds.seeded(log, name, "middle", 0.5, args.seed, breaks.ALL)
        _write(args.logs / f"{name.replace(' ', '-')}.jsonl", made)
        found = breaks.find(made)[0]
        base = breaks.baseline(log, name, args.seed)
        before = clean if base is log else breaks.find(base)[0]
        lost = breaks.missed(found) - breaks.missed(before)
        right = [f for f in found.findings if f.place == kind.place and f.kind in kind.names]
        rows.append(
            {
                "kind": name,
                "names": sorted(kind.names),
                "worth": lost >= breaks.LEAST_LOST * found.tokens,
                "right": bool(right),
                "wrong": len(found.findings) - len(right),
            }
        )
    manifest = {
        "set": args.set,
        "seed": args.seed,
        "sessions": args.sessions,
        "requests": len(log),
        "rows": rows,
    }
    (args.logs / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")


def _write(path: Path, log: list[dict[str, Any]]) -> None:
    hidden = {"app", "docs", "name", "turn"}
    lines = (json.dumps({k: v for k, v in row.items() if k not in hidden}) for row in log)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def theirs(args: argparse.Namespace) -> None:
    """Run kvlint's rules on each log."""
    import kvlint  # type: ignore[import-not-found]
    from kvlint.errors import KvlintError  # type: ignore[import-not-found]
    from kvlint.ingest import load  # type: ignore[import-not-found]
    from kvlint.lint.engine import run  # type: ignore[import-not-found]
    from kvlint.tokenize.renderer import tokenize_requests  # type: ignore[import-not-found]

    def rules(file: str) -> set[str] | None:
        try:
            requests = load(args.logs / file, "openai")
            found = run(requests, tokenize_requests(str(args.model), requests), 16)
        except KvlintError:
            return None
        return {one.rule_id if hasattr(one, "rule_id") else one.rule for one in found} & set(RULES)

    made = json.loads((args.logs / "manifest.json").read_text(encoding="utf-8"))
    clean = rules("clean.jsonl") or set()
    for row in made["rows"]:
        found = rules(f"{row['kind'].replace(' ', '-')}.jsonl")
        named = (found or set()) - clean
        right = {rule for rule in named if RULES[rule] & set(row["names"])}
        row["kvlint"] = {"read": found is not None, "right": bool(right), "wrong": len(named - right)}  # fmt: skip
        print(row, flush=True)
        result = made | {"kvlint": kvlint.__version__, "clean": sorted(clean)}
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("ours", "theirs"))
    parser.add_argument("--data", type=Path, help="folder of runs (ours)")
    parser.add_argument("--prose", type=Path, help="folder of texts (ours)")
    parser.add_argument("--set", default="independent", help="of kinds (breaks.SETS)")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--logs", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="folder with a tokenizer (theirs)")
    parser.add_argument("--out", type=Path, help="result file (theirs)")
    args = parser.parse_args()
    {"ours": ours, "theirs": theirs}[args.step](args)


if __name__ == "__main__":
    main()
