"""``canopy characterize``: reuse of KV in a trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from canopy_lab.characterize.findings import summary
from canopy_lab.characterize.trace_report import characterize
from canopy_lab.cli.shared import TraceOptions
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class Options(TraceOptions):
    out: Path = declare(
        None, "--out", "folder for report.html and report.json", metavar="FOLDER",
        parse=Path, required=True,
    )  # fmt: skip
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
    report = characterize(
        trace,
        args.detected_format,
        model=args.model_config,
        skip_bad=args.skip_bad,
        track=lambda requests: tqdm(requests, f"reading {trace.name}", unit="req", disable=None),
    )
    write_report(report, args.out)
    print(summary(report, args.out))
    return 0
