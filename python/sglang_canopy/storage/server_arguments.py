"""Review of SGLang's server arguments: whether they can change KV.

The namespace of a disk store contains every argument except those of ``LEAVES_KV``. Arguments in neither
list (``server_arguments.json``) count as changing KV; ``scripts/follow_sglang.py`` and a test report
them for review. An argument belongs to ``LEAVES_KV`` only if the same tokens give the same KV for all of
its values (ports, logs, scheduling, sizes of pools, processing before tokens or after logits), or if
the namespace contains its meaning (``model_path``: the files; ``lora_paths``: the adapters).
"""

from __future__ import annotations

import json
from pathlib import Path

_REVIEWED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LEAVES_KV = frozenset(_REVIEWED["leaves_kv"])
CHANGES_KV = frozenset(_REVIEWED["changes_kv"])


def unreviewed_arguments(names: set[str]) -> set[str]:
    """Return the SGLang arguments among ``names`` that are in neither list."""
    return names - LEAVES_KV - CHANGES_KV
