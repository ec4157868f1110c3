"""Set-ups in which a scheduler's overlapped loop is tested: arguments of `chaos_worker`, by name."""

import json
from pathlib import Path

from support.overlapped import OVERLAP

COMMON = ("--radix-eviction", "wa", OVERLAP)
PAGES = ("--page-size", "64", "--chunked-prefill-size", "256", "--max-running-requests", "2")
ORDER = ("--canopy-queue-order", "bounded-shortest")
GATE = ("--canopy-session-gate", "auto")
PRIORITIES = ("--enable-priority-scheduling", "--default-priority-value", "0")
SMALL_HOST = (
    *("--enable-hierarchical-cache", "--hicache-ratio", "3", "--max-total-tokens", "2560"),
    *("--hicache-write-policy", "write_back"),
)
DISK = ("--hicache-storage-backend", "canopy", "--hicache-storage-prefetch-policy", "wait_complete")
FEW = ("--max-running-requests", "3")
HOST = ("--enable-hierarchical-cache", "--hicache-ratio", "6")

DENSE = {
    "order, gate and priorities": (*PAGES, *ORDER, *GATE, *PRIORITIES),
    "order and retraction": (*PAGES, *ORDER),
    "first come, first served": PAGES,
    "order, gate, host memory": (*PAGES, *ORDER, *GATE, *SMALL_HOST),
    "order, host memory and disk": (*PAGES, *ORDER, *SMALL_HOST, *DISK),
}
HYBRID = {
    "sliding windows": ("windows", FEW),
    "sliding windows, host memory": ("windows", (*FEW, *HOST)),
}
"""Kind of model in `hybrid_models`, and arguments. With recurrent states SGLang turns the overlap off."""


def arguments(name: str, folder: Path) -> list[str]:
    """The worker's arguments for the set-up ``name``; a disk tier is put below ``folder``."""
    given = DENSE[name] if name in DENSE else HYBRID[name][1]
    extra = {"path": str(folder / "disk"), "capacity_gb": 0.1, "prefetch_threshold": 64}
    disk = ["--hicache-storage-backend-extra-config", json.dumps(extra)] if DISK[1] in given else []
    return [*COMMON, *given, *disk]


def environment(name: str) -> dict[str, str]:
    """SGLang retracts at random in the set-ups of retraction."""
    return {"SGLANG_TEST_RETRACT": "1"} if "retraction" in name else {}
