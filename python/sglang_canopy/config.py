"""Settings of the live tree that are not the policy's, and where both are validated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import parse_config


@dataclass(frozen=True, slots=True)
class TreeSettings:
    """Keys of ``--radix-eviction-policy-config`` that every Canopy policy takes."""

    quantum_tokens: int = 64
    """An eviction cuts at least this many tokens from a leaf's tail. More means fewer, larger
    cuts (less work a token); one page means that nothing more than needed is ever evicted."""
    whole_nodes: bool = False
    """Evict whole nodes, as SGLang's own policies do, instead of only as much as is needed."""
    block_tokens: int = 64
    """Granularity, in tokens, at which reuse is learnt."""

    def __post_init__(self) -> None:
        for key in ("quantum_tokens", "block_tokens"):
            if getattr(self, key) < 1:
                raise ValueError(f"key {key!r} must be at least 1, got {getattr(self, key)}")


TREE_KEYS = tuple(f.name for f in dataclasses.fields(TreeSettings))


def split_config(
    policy: str, config: Mapping[str, Any] | None
) -> tuple[TreeSettings, dict[str, Any]]:
    """Separate a user's JSON object into the tree's settings and the policy's options.

    Raises ``CanopyError`` for an ill-typed tree key; the policy's own keys are checked where
    the policy is made.
    """
    given = config or {}
    if not isinstance(given, Mapping):
        raise CanopyError(
            f"--radix-eviction-policy-config must be a JSON object, got {given!r}; "
            "for example: '{\"quantum_tokens\": 64}'"
        )
    tree = {k: v for k, v in given.items() if k in TREE_KEYS}
    options = {k: v for k, v in given.items() if k not in TREE_KEYS}
    return parse_config(policy, TreeSettings, tree), options
