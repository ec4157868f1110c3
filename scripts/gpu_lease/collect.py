"""The result file of a lease out of the folders that gpu_lease.sh packed:

python scripts/gpu_lease/collect.py DATE OUT.json FOLDER...   (each holds logs/ and results/)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

CHECKS = ("right", "attention", "movers")


def collect(folders: list[Path]) -> dict[str, Any]:
    """Return what gpu_check.py saved, by section, and every ``RESULT`` line, by its name."""
    found: dict[str, Any] = {}
    lines: dict[str, dict[str, list[Any]]] = {}
    for folder in folders:
        for name in CHECKS:
            if (file := folder / "results" / f"{name}.json").exists():
                found |= json.loads(file.read_text(encoding="utf-8"))
        for log in sorted((folder / "logs").glob("*.log")):
            part = lines[log.stem] = {}  # a later folder repeats the logs of an earlier one
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
                if line.startswith("RESULT "):
                    name, _, values = line[7:].partition(" {")
                    part.setdefault(name, []).append(json.loads("{" + values))
    return {**found, "parts": lines}


if __name__ == "__main__":
    date, out, *folders = sys.argv[1:]
    found = {"date": date, **collect([Path(f) for f in folders])}
    Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
