"""``canopy plan ttl``: write a plan file with a TTL for each prefix group, within a disk budget."""

from __future__ import annotations

import datetime
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from canopy_lab.cli.shared import TraceOptions
from canopy_lab.cli.values import above_zero, yaml_file
from canopy_lab.group_ttl.learn import GROUPS, LearningOptions, LearntTable, learn
from canopy_lab.group_ttl.paths import Paths, paths_of
from canopy_lab.plan.server_plan import write_config
from canopy_lab.report.table import text_table
from canopy_lab.report.units import bytes_text
from canopy_lab.sim.model import PRESETS, load_model_shape
from canopy_lab.trace.record import TraceRequest
from canopy_lab.trace.sglang_log import logs_tokens, read_as_server
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError

_MAX_SHOWN_GROUPS = 20
"""Groups that are printed: those with most hits."""


@dataclass(frozen=True, slots=True)
class Options(TraceOptions):
    budget_gb: float = declare(
        None, "--budget-gb", "average GB (1e9 bytes) on the disk", metavar="X", parse=above_zero,
        required=True,
    )  # fmt: skip
    model: str = declare(
        "llama-3.1-8b", "--model", f"whose KV bytes are counted: {', '.join(PRESETS)} or a config.json",
        metavar="NAME",
    )  # fmt: skip
    block_tokens: int = declare(
        64, "--block-tokens", "the server's block_tokens", metavar="N", low=1,
        high=65536,
    )  # fmt: skip
    output: Path | None = declare(
        None, "--out", "the TTLs, for SGLang's --config", metavar="PLAN.yaml", parse=yaml_file
    )


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Learn the TTLs, print the table and write the plan."""
    bytes_per_token = load_model_shape(args.model).kv_bytes_per_token()
    records = tqdm(_read_records(args), unit="request", desc="reading", disable=None)
    paths = paths_of(records)
    learnt = learn(paths, args.budget_gb * 1e9 / bytes_per_token, LearningOptions(kinds=(GROUPS,)))
    print(_report(learnt, paths, bytes_per_token))
    if args.output:
        write_config(args.output, {"canopy-ttl": learnt.table.to_json()}, _made_by(args))
        print(f"wrote {args.output}", file=sys.stderr)
    return 0


def _read_records(args: Options) -> Iterator[TraceRequest]:
    if args.detected_format != "sglang":
        raise CanopyError(
            f"{args.trace!r} has no block ids of a server; give the server's own request log "
            "(--format sglang)"
        )
    if not logs_tokens(args.trace):
        raise CanopyError(
            f"{args.trace!r} has prompts as text, without token ids, so a server's block ids "
            "cannot be computed; give a log of chat requests, or of input_ids"
        )
    return read_as_server(args.trace, block_tokens=args.block_tokens, skip_bad=args.skip_bad)


def _report(learnt: LearntTable, paths: Paths, bytes_per_token: int) -> str:
    roots = [row for row in learnt.rows if row.root is not None]
    residual_rows = [row for row in learnt.rows if row.root is None]
    roots.sort(key=lambda row: -row.hits)
    left_out = max(0, len(roots) - _MAX_SHOWN_GROUPS)
    cells = [
        [
            _group_name(row),
            _ttl_text(row.ttl_s),
            str(row.requests),
            f"{row.hits / 1e6:.3f}",
            bytes_text(row.mean_tokens * bytes_per_token),
        ]
        for row in (*roots[:_MAX_SHOWN_GROUPS], *residual_rows)
    ]
    table = text_table(["group", "TTL", "requests", "hits, M tokens", "mean on disk"], cells)
    mean_tokens = sum(row.mean_tokens for row in learnt.rows)
    notes = [
        f"{left_out} more groups are in the plan" if left_out else "",
        f"{len(paths)} requests in {paths.end_s - paths.start_s:.0f} s; expected: "
        f"{learnt.hits / 1e6:.3f} M tokens hit, {bytes_text(mean_tokens * bytes_per_token)} on the disk",
        _choice_text(learnt),
    ]
    return "\n".join([table, "", *filter(None, notes)])


def _choice_text(learnt: LearntTable) -> str:
    if not learnt.gains:
        return f"table: {learnt.kind}"
    gains = ", ".join(f"{kind} {100 * gain:+.2f}" for kind, gain in learnt.gains.items())
    return (
        f"table: {learnt.kind}; points of hit ratio over one TTL at the same bytes, made from "
        f"the first part of the trace and tried on the last: {gains}"
    )


def _group_name(row: Any) -> str:
    return "residual" if row.root is None else f"{row.root:#x}"


def _ttl_text(ttl_s: float) -> str:
    return "no expiry" if math.isinf(ttl_s) else f"{ttl_s:.4g} s"


def _made_by(args: Options) -> dict[str, Any]:
    return {
        "command": "canopy plan ttl",
        "trace": Path(args.trace).name,
        "budget_gb": args.budget_gb,
        "model": args.model,
        "date": datetime.date.today().isoformat(),
    }
