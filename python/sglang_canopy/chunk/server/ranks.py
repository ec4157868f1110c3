"""Tensor parallelism: each rank keeps its own heads' KV of a chunk, and all choose alike.

A rank's store, learner and plans are driven by the requests alone, which SGLang gives to every
rank in the same order; so they stay in step without being told. Three things need the others: the
projections' partial sums, the selector's scores (a sum over all heads), and when to stop encoding
in idle time, which only the first rank can see.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class TensorRanks:
    """The model's :class:`~sglang_canopy.chunk.model.Ranks`, by SGLang's own collectives.

    embedding: SGLang's module, which holds this rank's rows of the vocabulary; vocab: all of it.
    """

    embedding: Any
    vocab: int

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' ``part``, the same bits on each."""
        from sglang.srt.distributed import tensor_model_parallel_all_reduce

        return tensor_model_parallel_all_reduce(part)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """``[m]`` ids -> ``[m, hidden]``."""
        return self.embedding(ids)

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """``[m, this rank's share]`` -> ``[m, vocab]``."""
        from sglang.srt.distributed import tensor_model_parallel_all_gather

        return tensor_model_parallel_all_gather(logits)[..., : self.vocab]


def ranks_of(embedding: Any, vocab: int) -> TensorRanks | None:
    """The ranks a model is split over; ``None`` where it is whole."""
    return TensorRanks(embedding, vocab) if _group().world_size > 1 else None


def common(digest: str) -> str:
    """One digest of all ranks' digests: a chunk has the same address on each."""
    group = _group()
    if group.world_size == 1:
        return digest
    return hashlib.sha256("".join(group.all_gather_object(digest)).encode()).hexdigest()[:32]


def first_says(answer: bool) -> bool:
    """The first rank's answer, on every rank."""
    group = _group()
    return answer if group.world_size == 1 else bool(group.broadcast_object(answer))


def union(mine: list[int]) -> list[int]:
    """The numbers that any rank has, sorted, on every rank."""
    return sorted({one for theirs in _group().all_gather_object(mine) for one in theirs})


def _group() -> Any:
    from sglang.srt.distributed import get_tp_group

    return get_tp_group()
