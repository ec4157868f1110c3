"""The server of the chunk reuse benchmarks, and their result file."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rag_load import Library, library, state

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from launch_server import cpu_arguments, free_port, serving

QUESTION = 40
"""Tokens of a prompt that are kept for system text and question."""
STOCK = {"SGLANG_PLUGINS": "none"}
"""SGLang's switch for a server without plugins, Canopy included."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of all commands."""
    add = parser.add_argument
    add("--model", type=Path, required=True)
    add("--data", type=Path, required=True, help="folder of texts, or a file of questions")
    add("--documents", type=int, default=24, help="documents there are")
    add("--chunks", type=int, default=0, help="documents a prompt; 0: 6 at 2k to 16 at 7k tokens")
    add("--zipf", type=float, default=0.8, help="exponent of the documents' popularity")
    add("--ratio", type=float, default=None, help="share recomputed (0.15, or as calibrated)")
    add("--selector", default=None)
    add("--encode", default=None)
    add("--disk", action="store_true", help="keep chunks on disk only")
    add("--calibration", type=Path, default=None, help="what `canopy documents calibrate` saved")
    add("--dtype", default="float32")
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add("--json", type=Path, help="written anew after every row")


def chunks_for(tokens: int, given: int) -> int:
    """6 documents at 2k tokens, 11 at 4k, 16 at 7k by default."""
    return given or max(4, min(20, round(2 + tokens / 480)))


def a_library(tokenizer: Any, args: argparse.Namespace, tokens: int) -> tuple[Library, int]:
    """Return documents for prompts of about ``tokens`` tokens, and the number per prompt."""
    chunks = chunks_for(tokens, args.chunks)
    each = (tokens - QUESTION) // chunks
    return library(tokenizer, args.data, args.documents, each, args.zipf, args.seed), chunks


def flags_of(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the server's flag for documents, which the server validates."""
    keys = {"memory_mb": 0 if args.disk else 4096}
    if args.disk:
        keys |= {"disk_mb": 8192, "directory": str(folder)}
    keys |= {k: getattr(args, k) for k in ("ratio", "selector", "encode") if getattr(args, k)}
    if args.calibration is not None:
        keys["calibration"] = str(args.calibration)
    return ["--canopy-chunks", json.dumps(keys)]


@contextlib.contextmanager
def started(
    args: argparse.Namespace,
    longest: int,
    crowd: int = 2,
    flags: Sequence[str] | None = None,
    stock: bool = False,
) -> Iterator[Any]:
    """A server whose KV pool holds ``crowd`` prompts of ``longest`` tokens.

    flags: in place of those of chunk reuse; stock: without any plugin. The server's errors and
    counters are printed at the end.
    """
    with tempfile.TemporaryDirectory() as folder:
        mine = flags_of(args, Path(folder)) if flags is None else list(flags)
        mine += ["--chunked-prefill-size", "8192", "--context-length", "8192"]
        mine += ["--mem-fraction-static", "0.6"]
        kv = (longest + 512) * crowd
        given = [*cpu_arguments(args.model, kv_tokens=kv, dtype=args.dtype), *mine]
        environment = {"OMP_NUM_THREADS": str(args.threads), **(STOCK if stock else {})}
        log = Path(folder) / "server.log"
        with serving(given, log=log, port=free_port(), environment=environment) as server:
            yield server
            trouble = server.log_text().count("Traceback")
            known = "--canopy-chunks" in mine and not stock
            print(f"errors in the server's log: {trouble}; {counters(server.url) if known else ''}")


def counters(url: str) -> dict[str, Any]:
    """Return the server's counters of chunk reuse."""
    found = state(url)
    names = ("fused_requests", "reused_tokens", "recomputed_tokens", "fallbacks", "not_fused")
    return {name: found[name] for name in names}


class Rows(list[dict[str, Any]]):
    """Rows of a run; the file is written whole after every one, so that a run may be stopped."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.path: Path | None = args.json
        self.settings = {k: str(v) for k, v in vars(args).items()}

    def add(self, row: dict[str, Any]) -> None:
        self.append(row)
        if self.path is not None:
            found = {"settings": self.settings, "cpus": os.cpu_count(), "rows": self}
            self.path.write_text(json.dumps(found, indent=1))
