"""Decisions that all ranks of a model take alike.

Collective: every rank calls these functions at the same place, on its scheduler thread.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def reduction_groups(cache: Any) -> list[Any]:
    """Return the groups, for CPU tensors, that ``cache`` reduces over; none for one rank."""
    groups = [
        group
        for group in (cache.attn_cp_group, cache.attn_tp_group)
        if group is not None and torch.distributed.get_world_size(group=group) > 1
    ]
    return groups or ([cache.tp_group] if cache.tp_world_size > 1 else [])


def broadcast_from_first(groups: Sequence[Any], value: T) -> T:
    """Return the first rank's value, which is pickled, on all ranks of ``groups``."""
    for group in groups:
        values = [value]
        first_rank = torch.distributed.get_global_rank(group, 0)
        torch.distributed.broadcast_object_list(values, first_rank, group)
        (value,) = values
    return value


def min_over_ranks(cache: Any, values: Sequence[int]) -> list[int]:
    """Return the least value of any rank at each position."""
    return _min_over(values, cache._all_reduce)


def min_over_group(group: Any, values: Sequence[int]) -> list[int]:
    """As ``min_over_ranks``, over one group, for CPU tensors."""
    return _min_over(values, functools.partial(torch.distributed.all_reduce, group=group))


def all_over_groups(groups: Sequence[Any], flag: bool) -> bool:
    """Return whether ``flag`` is true on all ranks of ``groups``."""
    for group in groups:
        flag = min_over_group(group, [flag]) == [1]
    return flag


def _min_over(values: Sequence[int], all_reduce: Callable[..., Any]) -> list[int]:
    tensor = torch.tensor([int(value) for value in values], dtype=torch.int64)
    if len(values):
        all_reduce(tensor, torch.distributed.ReduceOp.MIN)
    return [int(value) for value in tensor.tolist()]


def all_over_ranks(cache: Any, flag: bool) -> bool:
    """Return whether ``flag`` is true on all ranks."""
    return min_over_ranks(cache, [flag]) == [1]
