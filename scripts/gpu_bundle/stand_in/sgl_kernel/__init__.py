"""Stand-in for ``sgl_kernel`` without its compiled kernels: the functions that a Llama needs.

Norms use SGLang's just-in-time kernels, the rest is plain torch. Every other name exists, so that
SGLang's imports succeed, and raises NotImplementedError when it is called.
``sgl_kernel.scalar_type`` must stay absent: SGLang then disables quantisation.
"""

from __future__ import annotations

import enum
import sys
import types

import torch


def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
    """Root-mean-square norm of ``input [n, d]`` times ``weight [d]``, into ``out`` where given."""
    from sglang.kernels.ops.layernorm import norm

    out = torch.empty_like(input) if out is None else out
    norm.rmsnorm(input, weight, out, eps)
    return out


def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
    """``residual += input``, then its norm into ``input``; both in place."""
    from sglang.kernels.ops.layernorm import norm

    norm.fused_add_rmsnorm(input, residual, weight, eps)


def silu_and_mul(input, out=None):
    """``silu(a) * b`` of ``input [..., 2 d]`` as ``[a, b]``."""
    gate, up = input.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    return product if out is None else out.copy_(product)


def top_k_renorm_prob(probs, top_k):
    """Return ``probs [n, vocab]`` with zeros except the ``top_k`` greatest of a row (ties are kept)."""
    ranked = probs.sort(dim=-1, descending=True).values
    count = torch.as_tensor(top_k, device=probs.device).long().clamp(1, probs.shape[-1])
    smallest_kept = ranked.gather(1, count.reshape(-1, 1).expand(len(probs), 1) - 1)
    kept = torch.where(probs >= smallest_kept, probs, 0)
    return kept / kept.sum(dim=-1, keepdim=True)


def top_p_renorm_prob(probs, top_p):
    """``probs [n, vocab]`` cut to the fewest whose sum reaches ``top_p``."""
    ranked, order = probs.sort(dim=-1, descending=True)
    share = torch.as_tensor(top_p, device=probs.device, dtype=probs.dtype).reshape(-1, 1)
    sum_before = ranked.cumsum(dim=-1) - ranked
    kept = torch.zeros_like(probs).scatter_(1, order, torch.where(sum_before > share, 0, ranked))
    return kept / kept.sum(dim=-1, keepdim=True)


def weak_ref_tensor(tensor):
    """The tensor itself: without CUDA graphs nothing outlives it."""
    return tensor


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Copy rows of every layer, ``src_indices`` to ``dst_indices``."""
    for source, target in zip(src_layers, dst_layers):
        rows = source[src_indices.to(source.device)]
        target[dst_indices.to(target.device)] = rows.to(target.device)


def _missing(module):
    def __getattr__(name):
        if name.startswith("__") or name == "scalar_type":
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise NotImplementedError(
                f"{module}.{name}: compiled kernels are not on this machine, and a dense Llama "
                "through Triton attention needs none of this name; install sglang-kernel"
            )

        return missing

    return __getattr__


def _module(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    if name.startswith("sgl_kernel."):
        module.__getattr__ = _missing(name)
    sys.modules[name] = module


def _launches_overlap():
    """Return whether the chip can overlap the start of a kernel with the previous kernel (Hopper)."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


__getattr__ = _missing("sgl_kernel")
_module("sgl_kernel.utils", is_arch_support_pdl=_launches_overlap)
_module("sgl_kernel.kvcacheio", transfer_kv_direct=transfer_kv_direct)
_module("sgl_kernel.quantization")
# SGLang imports CUTLASS's Python DSL for a product that only Blackwell has. It is not available here.
_module(
    "sglang.kernels.ops.gemm.cutedsl_dual_gemm",
    MAX_DUAL_GEMM_DECODE_TOKENS=0,
    DualGemmQuantMode=enum.Enum("DualGemmQuantMode", "UNQUANT DYNAMIC_PER_TOKEN STATIC_PER_TENSOR"),
    can_use_dual_gemm=lambda *args, **kwargs: False,
    dual_gemm=None,
)
