"""Paths of the checkout, of the tests whose streams are reused, and of the real traces; a digest."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
GOLDEN_FOLDER = Path(__file__).resolve().parent
PACKAGE_FOLDERS = ("python", "sgl-kernel/python", "sgl-kernel/cpu/src")
"""Folders that hold the project's packages."""
PROGRAM_FOLDERS = ("test", "test/radix", "scripts", "benchmark/golden", "benchmark/traces")


def use_checkout() -> None:
    """Put this checkout first on ``sys.path`` and PYTHONPATH, and set the environment of test/conftest.py."""
    folders = [str(ROOT / name) for name in (*PACKAGE_FOLDERS, *PROGRAM_FOLDERS)]
    sys.path[:0] = folders
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([inherited] if inherited else [])])
    # These are read when sglang is imported.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of SGLang's imports, in child processes


def data_folder() -> Path:
    """Return the folder of real traces: $CANOPY_DATA, else ``shared/data`` next to the checkout."""
    configured = os.environ.get("CANOPY_DATA")
    folder = Path(configured) if configured else ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        raise SystemExit("no traces: set CANOPY_DATA to a folder with mooncake/, agentic_coding/")
    return folder


def model_folder() -> Path:
    """Return the folder of the prepared SmolLM2."""
    folder = ROOT / ".canopy" / "models" / "smollm2-135m-instruct"
    if not (folder / "config.json").exists():
        raise SystemExit("SmolLM2 is not prepared: run ./scripts/test.sh once")
    return folder


def digest(values: Any) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of plain values (numbers, strings, lists)."""
    text = json.dumps(values, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
