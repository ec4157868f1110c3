"""``canopy characterize``: reuse of KV in a trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from canopy_lab.characterize.findings import summary
from canopy_lab.characterize.trace_report import ReadProgress, characterize
from canopy_lab.cli.shared import Bar, TraceOptions
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class Options(TraceOptions):
    out: Path = declare(
        None, "--out", "folder for report.html, report.json and the PNGs", metavar="FOLDER",
        parse=Path, required=True,
    )  # fmt: skip
    json: bool = declare(False, "--json", "print report.json instead of a summary")
    model_config: str = declare(
        "qwen2.5-7b", "--model-config",
        "preset or Hugging Face config.json whose KV bytes are counted", metavar="MODEL",
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> int:
    from canopy_lab.characterize.trace_page import write_report

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CanopyError(f"cannot make the folder {str(args.out)!r}: {error}") from None
    trace = Path(args.trace)
    with Bar(desc=f"characterize {trace.name}", unit="req", disable=None) as bar:
        report = characterize(
            trace,
            args.known_format,
            model=args.model_config,
            skip_bad=args.skip_bad,
            work=ReadProgress(bar.update, bar.resize),
        )
        if bar.total:
            bar.update(bar.total - bar.n)
    write_report(report, args.out)
    print(json.dumps(report.as_json()) if args.json else summary(report, args.out))
    return 0
