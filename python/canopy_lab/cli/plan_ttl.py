"""``canopy plan ttl``: write a plan file with a TTL for each prefix group, within a disk budget."""

from __future__ import annotations

import argparse
import datetime
import math
import sys
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tqdm import tqdm

from canopy_lab.report.table import bytes_text, text_table
from canopy_lab.sim.model import PRESETS, load_model_shape
from canopy_lab.sim.ttl import path_snapshot
from canopy_lab.trace.open import format_names, open_trace
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sglang_log import read_as_server
from sglang_canopy.config.plan_file import ServerPlan, write_plan
from sglang_canopy.errors import CanopyError
from sglang_canopy.ttl.learn import BOTH, CATEGORIES, GROUPS, Learning, Learnt, in_hindsight, learn
from sglang_canopy.ttl.path_log import PathSnapshot
from sglang_canopy.ttl.table import SERVER_HASH, TRACE_HASH

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy plan ttl``."""
    add = parser.add_argument
    add(
        "trace", metavar="TRACE", help="trace file; a server's own log makes a plan for that server"
    )
    add("--format", required=True, help=f"trace format: {', '.join(format_names())}")
    add(
        "--budget-gb",
        type=float,
        required=True,
        metavar="X",
        help="average GB (1e9 bytes) on the disk",
    )
    add(
        "--groups",
        type=int,
        default=64,
        metavar="K",
        help="prefix subtrees that get a TTL of their own (default 64)",
    )
    add("--categories", action="store_true", help="also a TTL by category, outside all subtrees")
    add(
        "--model",
        default="llama-3.1-8b",
        metavar="NAME",
        help=f"whose KV bytes are counted: {', '.join(PRESETS)} or a config.json",
    )
    add(
        "--refresh-s",
        type=float,
        default=600.0,
        metavar="S",
        help="how long the plan will be in force: what is new by then gets the residual TTL",
    )
    add(
        "--block-tokens",
        type=int,
        default=64,
        metavar="N",
        help="the server's block_tokens (format sglang)",
    )
    add(
        "--hindsight",
        action="store_true",
        help="fit the trace itself: what groups could win at best, not a plan",
    )
    add("--skip-bad", type=int, default=0, metavar="N", help="pass over N broken lines")
    add("--output", type=Path, metavar="PLAN.json", help="write the plan file (mode 0600)")
    add("--all", action="store_true", help=f"print every group, not the {_SHOWN} with most hits")


def run(args: argparse.Namespace) -> int:
    """Learn the TTLs, print the table, write the plan."""
    if not 0 < args.budget_gb < math.inf:
        raise CanopyError(f"--budget-gb must be a positive number, got {args.budget_gb}")
    if not 1 <= args.block_tokens <= 65536:
        raise CanopyError(f"--block-tokens must be from 1 to 65536, got {args.block_tokens}")
    if args.output and not args.output.resolve().parent.is_dir():
        raise CanopyError(f"cannot write {str(args.output)!r}: its folder does not exist")
    kinds = (BOTH, GROUPS, CATEGORIES) if args.categories else (GROUPS,)
    learning = Learning(groups=args.groups, kinds=kinds, refresh_s=args.refresh_s)
    bytes_per_token = load_model_shape(args.model).kv_bytes_per_token()
    records = tqdm(_records(args), unit="request", desc="reading", disable=None)
    log = path_snapshot(records)
    hash = SERVER_HASH if args.format == "sglang" else TRACE_HASH
    budget_tokens = args.budget_gb * 1e9 / bytes_per_token
    if args.hindsight:
        learnt = in_hindsight(log, budget_tokens, args.groups, hash)
    else:
        learnt = learn(log, budget_tokens, learning, hash)
    print(_report(learnt, log, bytes_per_token, None if args.all else _SHOWN))
    if args.output:
        write_plan(args.output, ServerPlan(ttl=learnt.table, made_by=_made_by(args)))
        print(f"wrote {args.output}", file=sys.stderr)
        if hash == TRACE_HASH and learnt.table.groups:
            print(
                "its roots are block ids of this trace: for simulations. A server needs a plan "
                "made from its own request log (--format sglang), or categories alone",
                file=sys.stderr,
            )
    return 0


def _records(args: argparse.Namespace) -> Iterator[TraceRequest]:
    if args.format == "sglang":
        return read_as_server(args.trace, block_tokens=args.block_tokens, skip_bad=args.skip_bad)
    return open_trace(args.trace, args.format, skip_bad=args.skip_bad)


def _report(learnt: Learnt, log: PathSnapshot, bytes_per_token: int, shown: int | None) -> str:
    roots = [row for row in learnt.rows if row.root is not None]
    rest = [row for row in learnt.rows if row.root is None]
    roots.sort(key=lambda row: -row.hits)
    left_out = 0 if shown is None else max(0, len(roots) - shown)
    lines = [
        [
            _name(row),
            _seconds(row.ttl_s),
            str(row.requests),
            f"{row.hits / 1e6:.3f}",
            bytes_text(row.mean_tokens * bytes_per_token),
        ]
        for row in (*roots[: len(roots) - left_out], *rest)
    ]
    table = text_table(["group", "TTL", "requests", "hits, M tokens", "mean on disk"], lines)
    tokens = sum(row.mean_tokens for row in learnt.rows)
    notes = [
        f"{left_out} more groups (--all shows them)" if left_out else "",
        f"{len(log)} requests in {log.end_s - log.start_s:.0f} s; expected: "
        f"{learnt.hits / 1e6:.3f} M tokens hit, {bytes_text(tokens * bytes_per_token)} on the disk",
        _why(learnt),
    ]
    return "\n".join([table, "", *filter(None, notes)])


def _why(learnt: Learnt) -> str:
    if not learnt.gains:
        return f"table: {learnt.kind}"
    gains = ", ".join(f"{kind} {100 * gain:+.2f}" for kind, gain in learnt.gains.items())
    return (
        f"table: {learnt.kind}; points of hit ratio over one TTL at the same bytes, made from "
        f"the first part of the trace and tried on the last: {gains}"
    )


def _name(row: Any) -> str:
    if row.root is not None:
        return f"{row.root:#x}"
    return "residual" if row.category in (None, "other") else row.category


def _seconds(ttl_s: float) -> str:
    return "no expiry" if math.isinf(ttl_s) else f"{ttl_s:.4g} s"


def _made_by(args: argparse.Namespace) -> dict[str, Any]:
    digest = blake2b(digest_size=16)
    if Path(args.trace).is_file():
        with open(args.trace, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return {
        "command": "canopy plan ttl",
        "trace": Path(args.trace).name,
        "trace_blake2b": digest.hexdigest(),
        "format": args.format,
        "budget_gb": args.budget_gb,
        "groups": args.groups,
        "model": args.model,
        "hindsight": args.hindsight,
        "date": datetime.date.today().isoformat(),
    }
