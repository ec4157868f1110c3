"""Restores the learnt state of the last server with this disk tier; the first rank reads it for all."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.saved_profile import Profile, read_or_set_aside
from sglang_canopy.ranks import all_over_groups, broadcast_from_first, reduction_groups
from sglang_canopy.storage.disk_link import DiskLink

if TYPE_CHECKING:
    from sglang_canopy.radix.cache import CanopyRadixCache

logger = logging.getLogger(__name__)

LEARNT_FILE = "learnt.json"
"""File with the learnt state, in the folder of the first rank's pages."""


def restore_learnt(cache: CanopyRadixCache, groups: Sequence[Any]) -> None:
    """Restore the learnt state of the last server with this disk tier, and save it there from now on.

    The file is in the first rank's namespace, so each model, set of weights and layout has a separate file.
    While another server still has the folder, as in a rolling update, this is done once the folder is
    available, except with pipeline stages, which cannot agree. Collective over ``groups``, for CPU tensors.
    """
    live, disk = cache.tree_core.live, cache.tree_core.disk
    if not isinstance(disk, DiskLink) or (store := disk.store) is None or not live.learners:
        return
    if not all_over_groups(groups, store.unavailable is None):
        if cache.pp_size == 1:
            disk.on_next_round = lambda: restore_learnt(cache, reduction_groups(cache))
        return
    is_first_rank = all(torch.distributed.get_rank(group=group) == 0 for group in groups)
    path = str(store.path / LEARNT_FILE) if is_first_rank else None
    try:
        saved = read_on_first_rank(path if path and os.path.exists(path) else None, groups)
        for policy in (*live.learners, store.policy) if saved else ():
            policy.restore(saved)
    except CanopyError as error:
        logger.warning("The state learnt by the last server is not used: %s", error)
    if path is not None:
        live.profile = Profile(path)


def read_on_first_rank(path: str | None, groups: Sequence[Any]) -> Any:
    """Return the first rank's ``read_or_set_aside(path)`` on every rank of ``groups``; ``None``
    without a path there.

    Ranks may run on several machines, and a rank that started from another state would evict
    differently. Collective; ``groups``: process groups for CPU tensors, none for one rank.
    """
    return broadcast_from_first(groups, None if path is None else read_or_set_aside(path))
