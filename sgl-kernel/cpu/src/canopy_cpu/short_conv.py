"""The causal convolution of short-convolution and Mamba layers, in torch.

SGLang has it compiled for CUDA and in Triton, neither of which runs on a CPU. Layouts are SGLang's:
the tokens of all requests concatenated, and the last inputs of each request in its own slot.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from sglang_canopy.errors import CanopyError

PAD_SLOT = -1
"""Entry of ``cache_indices`` without a request."""


def causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    query_start_loc: torch.Tensor | None = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    conv_states: torch.Tensor | None = None,
    activation: str | None = "silu",
    pad_slot_id: int = PAD_SLOT,
    **_: Any,
) -> torch.Tensor:
    """Convolve ``x`` [dim, tokens] of all requests with ``weight`` [dim, width]; returns x's shape.

    ``query_start_loc`` [requests + 1]: start of each request's tokens. ``conv_states`` [slots, dim,
    at least width - 1] is read if ``has_initial_state``, and written.
    """
    assert query_start_loc is not None, "requests side by side only"
    starts, width = query_start_loc.tolist(), weight.shape[1]
    out = torch.empty_like(x)
    for number, (start, end) in enumerate(pairwise(starts)):
        slot = number if cache_indices is None else int(cache_indices[number])
        if start == end or slot == pad_slot_id:
            continue
        earlier = x.new_zeros(x.shape[0], width - 1)
        has_state = has_initial_state is not None and bool(has_initial_state[number])
        if conv_states is not None and has_state:
            earlier = conv_states[slot, :, -(width - 1) :].to(x.dtype)
        inputs = torch.cat([earlier, x[:, start:end]], dim=1)
        out[:, start:end] = _convolve(inputs[None], weight, bias, activation)[0]
        if conv_states is not None:
            conv_states[slot, :, -(width - 1) :] = inputs[:, -(width - 1) :].to(conv_states.dtype)
    return out


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | bool | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    pad_slot_id: int = PAD_SLOT,
    **_: Any,
) -> torch.Tensor:
    """Convolve the new tokens of each request, ``x`` [requests, dim] or [requests, dim, tokens]; returns x's
    shape, and updates ``conv_state`` [slots, dim, at least width - 1].
    """
    assert cache_seqlens is None, "circular states are not used by SGLang's models"
    tokens = x if x.dim() == 3 else x[..., None]
    width = weight.shape[1]
    is_dense = conv_state_indices is None
    slots = torch.arange(len(x)) if is_dense else conv_state_indices.long()  # type: ignore[union-attr]
    has_request = slots != pad_slot_id
    slots = slots[has_request]
    earlier = conv_state[slots][..., -(width - 1) :].to(x.dtype)
    inputs = torch.cat([earlier, tokens[has_request]], dim=-1)
    out = torch.zeros_like(tokens)
    out[has_request] = _convolve(inputs, weight, bias, activation)
    conv_state[slots, :, -(width - 1) :] = inputs[..., -(width - 1) :].to(conv_state.dtype)
    return out if x.dim() == 3 else out[..., 0]


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: Any
) -> torch.Tensor:
    """Map [requests, dim, width - 1 + tokens] to [requests, dim, tokens]."""
    out = F.conv1d(inputs, weight[:, None].to(inputs.dtype), bias, groups=inputs.shape[1])
    return F.silu(out) if activation in ("silu", "swish", True) else out


def register_stand_ins() -> None:
    """Add the CPU kernels' names to SGLang's backends of recurrent layers, which import all of
    them.

    The convolutions are implemented above. Linear attention (the gated delta rule) is not: a model
    that needs it gets an error.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module(_KERNEL_MODULE)
        return
    kernels: Any = types.ModuleType(_KERNEL_MODULE, "Stand-ins of Canopy's CPU support.")
    kernels.causal_conv1d_fn_cpu = causal_conv1d_fn
    kernels.causal_conv1d_update_cpu = causal_conv1d_update
    kernels.chunk_gated_delta_rule_cpu = _refuse_linear_attention
    sys.modules[_KERNEL_MODULE] = kernels
    _OPERATORS.extend(_declare_operators())


def _refuse_linear_attention(*_: Any, **__: Any) -> Any:
    raise CanopyError(
        "linear attention (the gated delta rule) has no kernel for this CPU; serve this model on a "
        "GPU, or one with short convolutions (LFM2) here"
    )


def _declare_operators() -> list[torch.library.Library]:
    """Declare operators that SGLang names when it imports its backends of recurrent layers or Qwen's
    vision models."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    for name, arguments, results in (
        ("fused_gdn_gating_cpu", 4, 2),
        ("fused_sigmoid_gating_delta_rule_update_cpu", 10, 1),
        ("fused_sigmoid_mul_cpu", 2, 0),
        ("fused_qk_gemma_rmsnorm_cpu", 5, 2),
        ("fused_qk_gemma_rmsnorm_with_gate_cpu", 6, 3),
        ("fused_qkvzba_split_reshape_cat_contiguous_cpu", 6, 4),
    ):
        inputs = ", ".join(f"Tensor a{number}" for number in range(arguments))
        outputs = ", ".join(["Tensor"] * results)
        library.define(f"{name}({inputs}) -> ({outputs})")
        library.impl(name, _refuse_linear_attention, "CPU")
    return [library]


_KERNEL_MODULE = "sgl_kernel.mamba"
_OPERATORS: list[torch.library.Library] = []
"""References that keep the declared operators alive."""
