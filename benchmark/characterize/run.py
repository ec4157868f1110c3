"""Characterise all traces, and print the key numbers as a table.

python benchmark/characterize/run.py --data FOLDER --out DIR [--only NAME,NAME]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from canopy_lab.characterize.observe import Observation, observe
from canopy_lab.cli.main import main as canopy
from canopy_lab.trace.open import open_trace

sys.path.append(str(Path(__file__).resolve().parents[1] / "traces"))
from laws import laws
from make_overlay import main as make_overlay
from make_synthetic import main as make_synthetic
from published import compare

SYNTH = {"trace-a": ("--seconds", "86400", "--rate", "0.5"), "trace-b": ("--seconds", "2400")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with mooncake/, azure/, ..."
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder a trace is made here")
    parser.add_argument("--only", help="names of traces, separated by commas")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = args.only.split(",") if args.only else None
    rows = []
    for name, trace, format in traces(args.data, args.out, wanted):
        out = args.out / name
        started = time.perf_counter()
        command = ["characterize", str(trace), "--format", format, "--out", str(out)]
        if canopy(command):
            sys.exit(f"{name} failed")
        taken_s = time.perf_counter() - started
        if name in SYNTH:
            for one in compare(name, observe(open_trace(trace, format))):
                verdict = {True: "met", False: "missed", None: "not in this trace"}[one.met]
                print(f"  {one.name}: published {one.published}, here {one.got} ({verdict})")
        made = row(name, json.loads((out / "report.json").read_text()), taken_s)
        rows.append(made | fits(observe(open_trace(trace, format))))
    print_table(rows)


def traces(data: Path, out: Path, wanted: list[str] | None):  # type: ignore[no-untyped-def]
    """(name, file, format) of every trace, those to be made made."""

    def asked(name: str) -> bool:
        return wanted is None or name in wanted

    for name, file in (("conversation", "conversation_first60"), ("synthetic", "synthetic_trace")):
        if asked(name):
            yield name, data / "mooncake" / f"{file}.jsonl", "mooncake"
    if asked("agentic"):
        overlay = out / "agentic_overlay.jsonl"
        archive = data / "agentic_coding" / "traces_500.tar.xz"
        command = ["--archive", str(archive), "--conversations", "200"]
        if make_overlay([*command, "--window-s", "7200", "--seed", "1", "-o", str(overlay)]):
            sys.exit("overlay failed")
        yield "agentic", overlay, "agentic"
    if asked("azure"):
        yield "azure", data / "azure" / "AzureLLMInferenceTrace_code.csv", "azure"
    for preset, length in SYNTH.items():
        if asked(preset):
            made = out / f"{preset}.jsonl"
            command = ["--preset", preset, *length, "--seed", "1"]
            if make_synthetic([*command, "-o", str(made)]):
                sys.exit("synth failed")
            yield preset, made, "bailian"


def row(name: str, report: dict, taken_s: float) -> dict[str, str]:
    """The numbers of one report, as text; a dash where the trace has no answer."""
    got = {"trace": name, "requests": f"{report['overview']['requests']:,}"}
    hits, turns, reuse = report["hits"], report["turns"], report["reuse"]
    life, room = report["lifespan"], report["capacity"]
    got["ideal"] = f"{100 * hits['block_hit_ratio']:.1f} %" if hits else "-"
    later = [t for t in hits["turns"] if t["name"] == "later turns"] if hits else []
    got["hits of later turns"] = f"{100 * later[0]['hits']:.0f} %" if later else "-"
    got["turn P90"] = f"{turns['p90']:.0f}" if turns else "-"
    got["reuse P50, P90"] = (
        f"{reuse['all']['p50_s']:.3g} s, {reuse['all']['p90_s']:.3g} s" if reuse else "-"
    )
    got["lifespan P90"] = f"{life['p90_s']:.3g} s" if life else "-"
    if room:
        need = dict(room["lru_for_share"])[0.9] / room["distinct_blocks"]
        got["LRU: 90 % of ideal with"] = f"{100 * need:.1f} %"
    else:
        got["LRU: 90 % of ideal with"] = "-"
    got["s"] = f"{taken_s:.0f}"
    return got


def fits(seen: Observation) -> dict[str, str]:
    """KS distances of the laws, means over categories weighted by reuses."""
    found = laws(seen)[1:] if seen.hits.any() else []
    weight = sum(one.reuses for one in found)
    return {
        f"KS {law}": f"{sum(one.reuses * getattr(one, law).ks for one in found) / weight:.2f}"
        if found
        else "-"
        for law in ("survival", "exponential")
    }


def print_table(rows: list[dict[str, str]]) -> None:
    """Turned on its side: a column a trace."""
    print("\n|  | " + " | ".join(r["trace"] for r in rows) + " |")
    print("|" + "---|" * (len(rows) + 1))
    for key in list(rows[0])[1:]:
        print(f"| {key} | " + " | ".join(r[key] for r in rows) + " |")


if __name__ == "__main__":
    main()
