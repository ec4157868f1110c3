"""Count what SGLang's overlapped loop gets wrong under random exchanges, pauses, flushes and aborts.

    python benchmark/overlap/run.py --steps 300 --seeds 2

Runs `test/support/chaos_worker.py` in each set-up of `test/support/chaos_setups.py` and writes
`benchmark/overlap/results/chaos.json`; the set-ups and seeds of earlier runs stay in it. Exits with 1 if an
answer is wrong or a request is not served.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "scripts"), str(ROOT / "test")]

from support import chaos_setups  # noqa: E402
from support.hybrid_models import build  # noqa: E402
from support.small_models import LLAMA, write_model  # noqa: E402
from support.worker import worked  # noqa: E402

SMOLLM2 = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
RESULTS = Path(__file__).parent / "results" / "chaos.json"
PATIENCE_S = 3600


def model_of(name: str, folder: Path) -> Path:
    kind = chaos_setups.HYBRID[name][0] if name in chaos_setups.HYBRID else "llama"
    path = folder / kind
    if not path.exists():
        if kind == "llama":
            write_model(path, SMOLLM2, LLAMA)
        else:
            build(kind, path, SMOLLM2)
    return path


def life(name: str, models: Path, seed: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(seed), str(steps), *chaos_setups.arguments(name, Path(folder)))
        environment = chaos_setups.environment(name)
        model = model_of(name, models)
        counts = worked("chaos_worker", model, *arguments, patience_s=PATIENCE_S, **environment)
    return {"setup": name, "seed": seed, "steps": steps, **counts}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    every = [*chaos_setups.DENSE, *chaos_setups.HYBRID]
    parser.add_argument("setups", nargs="*", default=every, metavar="SETUP", help="; ".join(every))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=10)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    lives = json.loads(args.json.read_text())["lives"] if args.json.exists() else []
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    with tempfile.TemporaryDirectory() as models:
        for seed, name in itertools.product(seeds, args.setups):
            new = life(name, Path(models), seed, args.steps)
            print(json.dumps(new), flush=True)
            lives = [one for one in lives if (one["setup"], one["seed"]) != (name, seed)] + [new]
            lives.sort(key=lambda one: (every.index(one["setup"]), one["seed"]))
            args.json.parent.mkdir(exist_ok=True)
            args.json.write_text(json.dumps({"lives": lives}, indent=1) + "\n")
    return int(any(one["wrong"] or one["unserved"] for one in lives))


if __name__ == "__main__":
    sys.exit(main())
