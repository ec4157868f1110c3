"""Make the quick start's trace: synthetic chats and synthetic API traffic on one server.

python benchmark/quickstart/make_trace.py -o benchmark/quickstart/mixed_synthetic.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from synthetic.presets import get_preset
from synthetic.trace import meta_path, write_trace

SECONDS = 300.0
PARTS = (("small", 0.7), ("trace-b", 0.7))  # preset, requests a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    requests: list[dict[str, Any]] = []
    with TemporaryDirectory() as scratch:
        for preset, rate in PARTS:
            part = Path(scratch) / f"{preset}.jsonl"
            write_trace(part, get_preset(preset).at_rate(rate), SECONDS, args.seed)
            requests += shifted([json.loads(line) for line in part.open()], requests)
    requests.sort(key=lambda request: request["timestamp"])
    with args.out.open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(r, separators=(",", ":")) + "\n" for r in requests)
    about = {
        "synthetic": True,
        "note": "Made by benchmark/quickstart/make_trace.py. Nobody ever sent these requests.",
        "format": "bailian",
        "presets": {preset: f"{rate} requests/s" for preset, rate in PARTS},
        "seconds": SECONDS,
        "seed": args.seed,
        "requests": len(requests),
        "prompt_tokens": sum(r["input_length"] for r in requests),
    }
    meta_path(args.out).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


def shifted(part: list[dict[str, Any]], before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the requests with conversation and block ids that are not in `before`."""
    chats = 1 + max((r["chat_id"] for r in before), default=-1)
    blocks = 1 + max((b for r in before for b in r["hash_ids"]), default=-1)
    for request in part:
        request["chat_id"] += chats
        if request["parent_chat_id"] >= 0:
            request["parent_chat_id"] += chats
        request["hash_ids"] = [block + blocks for block in request["hash_ids"]]
    return part


if __name__ == "__main__":
    main()
