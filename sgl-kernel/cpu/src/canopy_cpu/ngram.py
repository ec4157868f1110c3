"""Speculative decoding by n-grams on a CPU: SGLang's kernels for trees of drafts, in torch.

SGLang's CPU engine imports them from the CPU build of ``sgl_kernel``, which is not on PyPI. A step
verifies ``n`` drafts of each request. They are the nodes of a tree; node 0 is the last accepted
token. Only greedy sampling is implemented.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Compute the position of each draft in its tree.

    ``tree_mask`` bool [requests * n * n]: whether node j is node i or an ancestor of it;
    ``verified_seq_len`` [requests]. Writes, for each of requests * n nodes: position in the
    sequence, index in the batch, first child and next sibling (-1: none).
    """
    size = draft_token_num
    node = torch.arange(size)
    mask = tree_mask.view(batch_size, size, size).bool()
    above = mask & (node[None, :] < node[:, None])
    filled = (batch_size, size)
    positions.view(filled).copy_(above.sum(-1) + verified_seq_len[:, None])
    retrieve_index.view(filled).copy_(torch.arange(batch_size * size).view(filled))
    parents = torch.where(above, node, -1).amax(-1)
    first_child = torch.where(above, node[:, None], size).amin(1)
    retrieve_next_token.view(filled).copy_(torch.where(first_child < size, first_child, -1))
    younger = (parents[:, :, None] == parents[:, None, :]) & (node[:, None] > node[None, :])
    sibling = torch.where(younger, node[:, None], size).amin(1)
    retrieve_next_sibling.view(filled).copy_(
        torch.where((sibling < size) & (parents >= 0), sibling, -1)
    )


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Descend each tree while a child equals the model's token.

    ``candidates`` and ``retrive_...`` [requests, n] describe the trees, ``target_predict``
    [requests * n] is the model's token after each node. Writes ``accept_index`` [requests, most]:
    the accepted nodes' indices in the batch; ``accept_token_num`` [requests]: the number of
    accepted drafts; ``predicts`` [requests * n]: the model's token after each accepted node.
    """
    drafted, tokens, numbers, children, siblings = (
        one.tolist()
        for one in (
            target_predict.flatten(),
            candidates,
            retrive_index,
            retrive_next_token,
            retrive_next_sibling,
        )
    )
    most = accept_index.shape[1]
    for request, number in enumerate(numbers):
        accepted = [number[0]]
        node = children[request][0]
        while node != -1 and len(accepted) < most:
            if tokens[request][node] == drafted[accepted[-1]]:
                accepted.append(number[node])
                node = children[request][node]
            else:
                node = siblings[request][node]
        for place, which in enumerate(accepted):
            accept_index[request, place] = which
            predicts[which] = drafted[which]
        accept_token_num[request] = len(accepted) - 1


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Concatenate the slots ``start:end`` of each request's row."""
    taken = 0
    for row, start, end in zip(
        req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    ):
        slots = req_to_token[row, start:end]
        out_cache_loc[taken : taken + len(slots)] = slots.to(out_cache_loc.dtype)
        taken += len(slots)


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Pack the slots of the accepted nodes; -1 in ``accept_index`` marks an empty entry."""
    accepted = accept_index.flatten()
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[: len(slots)] = slots.to(accept_out_cache_loc.dtype)


KERNELS = (
    verify_tree_greedy_cpu,
    assign_extend_cache_locs_cpu,
    fill_accept_out_cache_loc_cpu,
)
_USERS = {
    "sglang.kernels.ops.speculative.cache_locs": "",
    "sglang.kernels.ops.speculative.eagle": "",
    "sglang.kernels.ops.speculative.spec_tree": "sgl_",
}
"""Modules that import the kernels, and the prefix that each adds to a kernel's name."""
_TREES = "sgl_kernel.speculative"


def stand_in_for_kernels() -> None:
    """Insert the kernels into the modules that import them, unless ``sgl_kernel`` has them."""
    sgl_kernel: Any = importlib.import_module("sgl_kernel")
    for kernel in KERNELS:
        if kernel.__name__ in vars(sgl_kernel):
            continue
        setattr(sgl_kernel, kernel.__name__, kernel)
        for name, prefix in _USERS.items():
            user = sys.modules.get(name)  # modules imported earlier hold the old function
            if hasattr(user, prefix + kernel.__name__):
                setattr(user, prefix + kernel.__name__, kernel)
    try:
        importlib.import_module(_TREES)
    except ImportError:
        trees: Any = types.ModuleType(_TREES, "Stand-ins of Canopy's CPU support.")
        trees.reconstruct_indices_from_tree_mask = reconstruct_indices_from_tree_mask
        sys.modules[_TREES] = trees
