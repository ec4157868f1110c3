"""Make an engine profile from published kernel times, without a server.

    pip install --no-deps --target KERNELS aiconfigurator-core pyarrow
    PYTHONPATH=KERNELS python benchmark/profiles/from_tables.py KERNELS --system h100_sxm \
        --model llama-3.1-8b --parameters 8.03e9 --output h100.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_tables import GPU, KernelTables, kernel_profile

from canopy_lab.sim.model import load_model_shape
from canopy_lab.sim.system.engine_profile import EngineProfile
from sglang_canopy.errors import CanopyError

_HOW = "pip install --no-deps --target FOLDER aiconfigurator-core pyarrow"
_FILES = {
    "gemm": "gemm/sglang/*/gemm_perf.parquet",
    "context_attention": "attention/sglang/*/context_attention_perf.parquet",
    "generation_attention": "attention/sglang/*/generation_attention_perf.parquet",
    "all_reduce": "comm/sglang/*/custom_allreduce_perf.parquet",
}


def profile_of(args: argparse.Namespace) -> EngineProfile:
    """Return the profile. Raises ``CanopyError`` with the missing input."""
    folder = Path(args.folder) / "aiconfigurator_core" / "systems"
    data = folder / "data" / args.system
    if not data.is_dir():
        known = sorted(p.name for p in (folder / "data").glob("*") if (p / "gemm").is_dir())
        raise CanopyError(
            f"no tables of {args.system!r} in {args.folder!r}; it has: "
            f"{', '.join(known) or 'none'} ({_HOW})"
        )
    files = {name: _newest(data, pattern) for name, pattern in _FILES.items()}
    tables = KernelTables(**{n: _rows(f) if f is not None else [] for n, f in files.items()})
    names = [str(f.relative_to(folder)) for f in files.values() if f is not None]
    shape = load_model_shape(args.model)
    model = Path(args.model).stem if args.model.endswith(".json") else args.model
    gpu = _gpu(folder / f"{args.system}.yaml", tables)
    return kernel_profile(
        args.name or f"{model}-{args.system}-tp{args.tp}",
        model,
        shape,
        args.parameters,
        tables,
        gpu,
        tp=args.tp,
        date=datetime.date.today().isoformat(),
        sources=(f"AIConfigurator's kernel times of {args.system}", *names),
    )


def _newest(folder: Path, pattern: str) -> Path | None:
    found = list(folder.glob(pattern))
    return max(found, key=lambda f: [_number(p) for p in f.parent.name.split(".")], default=None)


def _number(part: str) -> int:
    return int(part) if part.isdecimal() else -1


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise CanopyError(
            f"reading {path.name} needs pyarrow: {_HOW}, and PYTHONPATH=FOLDER"
        ) from None
    rows: list[Mapping[str, Any]] = parquet.read_table(path).to_pylist()
    return rows


def _gpu(path: Path, tables: KernelTables) -> GPU:
    """The few figures of a system's file that are needed; its lines are ``name: figure # why``."""
    figures = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            name, separator, value = line.partition(":")
            if separator and name.strip() in ("mem_capacity", "pcie_bw"):
                figures[name.strip()] = float(value.partition("#")[0])
        device = next(str(row["device"]) for row in tables.gemm)
        return GPU(device, figures["mem_capacity"], figures["pcie_bw"])
    except (OSError, KeyError, ValueError, StopIteration) as error:
        raise CanopyError(
            f"{str(path)!r} does not say the GPU's memory and link: {error}"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("folder", help="of the package aiconfigurator-core")
    add("--system", required=True, metavar="NAME", help="one of its systems, such as h100_sxm")
    add("--model", required=True, metavar="NAME", help="a preset, or a config.json")
    add("--parameters", required=True, type=float, metavar="N", help="of the model, such as 8.03e9")
    add("--tp", type=int, default=1, metavar="N", help="GPUs that share one server")
    add("--name", help="what the profile is called")
    add("--output", required=True, type=Path, metavar="FILE", help="where the profile goes, JSON")
    args = parser.parse_args(argv)
    try:
        profile = profile_of(args)
    except CanopyError as error:
        print(f"from_tables: {error}", file=sys.stderr)
        return 2
    args.output.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{args.output}: {profile.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
