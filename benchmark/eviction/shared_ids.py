"""Compare overlays that infer shared heads with the block ids that agents' sessions truly share.

    python benchmark/eviction/shared_ids.py --data DIR --out benchmark/eviction/results/shared_ids.json

agents_global.tar.xz has block ids that are valid in all sessions of a user. ``true`` keeps them; ``heads``
numbers the blocks of each session alone and shares heads by model and counts, as overlays of other archives
do. Both have the same sessions and starts, for users that constants were tuned on and users that judge. A cache is a
share of the distinct blocks of ``true``, merged to 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from by_user import write
from depth_weight import MERGED, USERS
from overlays import overlay

from canopy_lab.advise.sample import merged
from canopy_lab.sim.driver import distinct_blocks, simulate
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.policy.registry import make_policy

SHARES = (0.02, 0.05, 0.1, 0.2)
WINDOW_S = 7200.0


def alone(document: dict[str, Any]) -> dict[str, Any]:
    """Return a session whose block ids are numbered in its own file alone."""
    ids: dict[int, int] = {}

    def renumbered(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            entry
            | (
                {"requests": renumbered(entry["requests"])}
                if "requests" in entry
                else {"hash_ids": [ids.setdefault(b, len(ids) + 1) for b in entry["hash_ids"]]}
            )
            for entry in entries
        ]

    return document | {"hash_id_scope": "local", "requests": renumbered(document["requests"])}


def traces(folder: Path, sessions: int, seed: int) -> dict[str, list[TraceRequest]]:
    """Return the same overlay with both kinds of block ids."""
    own = folder / "heads"
    if not own.exists():
        own.mkdir()
        for file in sorted(folder.glob("*.json")):
            document = alone(json.loads(file.read_bytes()))
            (own / file.name).write_text(json.dumps(document), encoding="utf-8")
    return {
        ids: [merged(r, MERGED) for r in overlay(path, sessions, WINDOW_S, seed)]
        for ids, path in (("true", folder), ("heads", own))
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with agents_global.tar.xz")
    add("--out", type=Path, required=True, help="JSON file")
    add("--seeds", type=int, default=3, help="overlays of each set of users")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for split, users in USERS.items():
        with tempfile.TemporaryDirectory() as folder:
            sessions = write(args.data / "agents_global.tar.xz", users, Path(folder))
            for seed in range(1, args.seeds + 1):
                made = traces(Path(folder), sessions, seed)
                distinct = distinct_blocks(made["true"])
                for share in SHARES:
                    for ids, trace in made.items():
                        for policy in ("lru", "wa"):
                            found = simulate(trace, make_policy(policy), round(share * distinct))
                            rows.append(
                                {
                                    "split": split,
                                    "sessions": sessions,
                                    "seed": seed,
                                    "share": share,
                                    "ids": ids,
                                    "policy": policy,
                                    "token_hits": round(100 * found.token_hit_ratio, 3),
                                }
                            )
                args.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
