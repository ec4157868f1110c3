"""LoRA without a GPU: SGLang pins the memory that it copies to the device, which requires CUDA.

On a CPU nothing is copied between memories, so pinning is omitted: in SGLang's modules that make
pinned tensors for adapters, and in ``Tensor.pin_memory``.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch

MODULES = ("layers", "lora", "mem_pool", "backend.torch_backend")
"""Modules of ``sglang.srt.lora`` that pin memory when torch computes the adapters."""
_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange")


class _UnpinnedTorch(ModuleType):
    """torch with factories that ignore ``pin_memory``."""

    def __getattr__(self, name: str) -> Any:
        original = getattr(torch, name)
        if name not in _FACTORIES:
            return original

        def create_unpinned(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return original(*args, **kwargs)

        return create_unpinned


def disable_pinning(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook of ``LoRAManager.__init__``: make torch ignore pinning, before adapters are loaded."""
    for name in MODULES:
        module = importlib.import_module(f"sglang.srt.lora.{name}")
        module.torch = _UnpinnedTorch("torch")  # type: ignore[attr-defined]
    torch.Tensor.pin_memory = _return_unpinned  # type: ignore[method-assign, assignment]
    return args, kwargs


def _return_unpinned(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
    return tensor
