"""Compare ``canopy doctor`` with started servers on 25 public command lines.

    PYTHONPATH=test python benchmark/setups/doctor_lines.py --model SMOLLM2

Each line starts a server on a CPU without the line's hardware (``test/doctor/started_lines.py``). Lines
that results/doctor_lines.json has are not started again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

RESULTS = "benchmark/setups/results/doctor_lines.json"
ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Start the missing lines."""
    from doctor.public_lines import LINES
    from doctor.started_lines import compared, models, started, words_of
    from support.doctored import reports_on

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder with a tokenizer")
    parser.add_argument("--lines", type=int, nargs="*", default=range(len(LINES)))
    options = parser.parse_args()
    path = ROOT / RESULTS
    path.parent.mkdir(exist_ok=True)
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        made = models(Path(folder), options.model)
        words = {
            str(n): words_of(LINES[n], made) for n in options.lines if LINES[n].source not in rows
        }
        reports = reports_on({n: ["sglang", "serve", *given] for n, given in words.items()})
        for n, given in words.items():
            line, found = LINES[int(n)], started(given, Path(folder) / "log")
            row = compared(line, reports[n], found)
            print(json.dumps(row), found.get("stopped", "")[-1500:], flush=True)
            rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            rows[line.source] = {key: row[key] for key in ("answer", "server", "agrees")}
            path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
