"""The quality meter of a running server: clean traffic, then a seeded fault, and when it acts.

    python benchmark/chunk/meter_fault.py --model DIR --data musique_100.json --minutes 7 --json OUT

Bursts of prompts with real documents in any order, and a pause until nothing waits to be checked. The
fault: the values of every stored document are given to other tokens of it, inside the server.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import rag_server
from rag_load import Library, ask, learn, library, state

from launch_server import cpu_arguments, free_port, serving

BURST = 10
PAUSE_S = 15.0
MOST = 400
"""Prompts after the fault."""
FAULT = """
import gc, os, threading, time

def wait():
    while not os.path.exists(os.environ["SEEDED_FAULT"]):
        time.sleep(0.2)
    gc.unfreeze()  # SGLang freezes what is there after its warm-up, which hides it
    for one in gc.get_objects():
        if type(one).__name__ == "ChunkStore":
            for tier in one._tiers:
                for entry in tier.entries.values():
                    v = entry.chunk.v  # on a CPU every chunk has tensors of its own
                    v.copy_(v.flip(1))
                print("seeded fault in", len(tier.entries), "documents", flush=True)

threading.Thread(target=wait, daemon=True).start()
"""
"""``sitecustomize`` of the server's processes: waits for a file, then shuffles what they have stored."""


def burst(url: str, lib: Library, args: argparse.Namespace) -> dict[str, Any]:
    """Send prompts, pause, and return the meter's status."""
    fused = sum(bool(ask(url, lib.prompt(args.chunks)).report.get("fused")) for _ in range(BURST))
    end = time.monotonic() + PAUSE_S
    while (found := state(url)["quality"])["waiting"] and time.monotonic() < end:
        time.sleep(0.3)
    return {"fused": fused, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    rag_server.add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=290, help="of a prompt")
    parser.add_argument("--minutes", type=float, default=7, help="of clean traffic")
    args = parser.parse_args()
    args.chunks = args.chunks or 4
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    each = (args.tokens - rag_server.QUESTION) // args.chunks
    lib = library(tokenizer, args.data, args.documents, each, args.zipf, args.seed)
    rows = rag_server.Rows(args)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(FAULT)
        fault = Path(folder) / "fault"
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "SEEDED_FAULT": str(fault)}
        given = [*cpu_arguments(args.model, kv_tokens=4096, dtype=args.dtype)]
        given += ["--canopy-chunks", json.dumps({"memory_mb": 2048})]
        log = Path(folder) / "server.log"
        with serving(given, log=log, port=free_port(), environment=environment) as server:
            learn(server.url, lib, args.chunks)
            began, prompts = time.monotonic(), 0
            while time.monotonic() - began < 60 * args.minutes:
                rows.add({"phase": "clean", "prompts": 0, **burst(server.url, lib, args)})
            fault.touch()
            deadline = time.monotonic() + 60
            while "seeded fault in" not in server.log_text():
                if time.monotonic() > deadline:
                    raise SystemExit("the server found no documents to shuffle")
                time.sleep(0.2)
            while prompts < MOST and not rows[-1]["tenants_stopped"]:
                prompts += BURST
                rows.add({"phase": "fault", "prompts": prompts, **burst(server.url, lib, args)})
            print(
                "\n".join(
                    x
                    for x in server.log_text().splitlines()
                    if "reuse of documents" in x or "seeded" in x
                )
            )
            print(f"errors in the server's log: {server.log_text().count('Traceback')}")
    print(json.dumps(summary(rows), indent=1))


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Prompts, checks and differences of each phase; prompts after the fault until it acted."""
    clean = [r for r in rows if r["phase"] == "clean"]
    broken = [r for r in rows if r["phase"] == "fault"]
    acted = {
        step: next((r["prompts"] for r in broken if r["tenants_stopped"] or r[step]), None)
        for step in ("tenants_raised", "tenants_stopped")
    }
    return {
        "clean_prompts": BURST * len(clean),
        "clean_checked": clean[-1]["checked"],
        "clean_differed": clean[-1]["differed"],
        "clean_bursts_raised": sum(
            bool(r["tenants_raised"] or r["tenants_stopped"]) for r in clean
        ),
        "fault_checked": broken[-1]["checked"] - clean[-1]["checked"],
        "fault_differed": broken[-1]["differed"] - clean[-1]["differed"],
        **{f"prompts_until_{step}": prompts for step, prompts in acted.items()},
    }


if __name__ == "__main__":
    main()
