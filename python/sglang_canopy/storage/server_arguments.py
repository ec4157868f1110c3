"""SGLang's server arguments, reviewed: which cannot change KV, and which are taken to.

A namespace on disk has the digest of every argument but those of ``LEAVES_KV``. One that is in
neither list (``server_arguments.json``) counts as changing KV; ``scripts/follow_sglang.py`` and a
test name it, so that it is reviewed: an argument belongs to ``LEAVES_KV`` only if the same tokens
give the same KV whatever its value is (ports, logs, scheduling, sizes of pools, what happens before
tokens or after logits), or if the namespace has what it stands for (``model_path``: the files;
``lora_paths``: the adapters).
"""

from __future__ import annotations

import json
from pathlib import Path

_REVIEWED = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
LEAVES_KV = frozenset(_REVIEWED["leaves_kv"])
CHANGES_KV = frozenset(_REVIEWED["changes_kv"])


def unreviewed(names: set[str]) -> set[str]:
    """Those of ``names``, SGLang's arguments, that nobody has looked at."""
    return names - LEAVES_KV - CHANGES_KV
