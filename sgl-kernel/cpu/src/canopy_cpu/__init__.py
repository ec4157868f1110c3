"""SGLang on a CPU: attention over new tokens, convolutions, HiCache and LoRA without CUDA.

Canopy's plugin calls `install()` at load if torch finds no CUDA device. The import stand-ins next
to this package act before any plugin is loaded.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

from sglang_canopy.errors import CanopyError

_TORCH_NATIVE = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
_POOL_BASE = "sglang.srt.mem_cache.pool_host.base"
_HOST_POOL = f"{_POOL_BASE}.HostKVCache"
_MHA_HOST = "sglang.srt.mem_cache.pool_host.mha"
_CONV = "sglang.srt.layers.attention.mamba.causal_conv1d"
_MAMBA_HOST = "sglang.srt.mem_cache.pool_host.mamba"
_MLA_HOST = "sglang.srt.mem_cache.pool_host.mla"
_LAYOUT = "sglang.srt.arg_groups.hicache_hook.resolve_layout_io_compatibility"
_MLA_REGISTER = (
    "sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.register"
)
_LORA = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
_BACKENDS = "sglang.srt.arg_groups.platform_hook.handle_cpu_backends"

CHECKED_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "sglang.srt.layers.attention.attention_registry.register_attention_backend": ("name",),
    f"{_TORCH_NATIVE}.init_forward_metadata": ("self", "forward_batch"),
    f"{_TORCH_NATIVE}._run_sdpa_forward_extend": (
        *("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices"),
        *("seq_lens", "extend_prefix_lens", "extend_seq_lens", "encoder_lens", "scaling"),
        *("enable_gqa", "causal", "is_cross_attn", "sliding_window_size"),
    ),
    f"{_TORCH_NATIVE}._run_sdpa_forward_decode": (
        *("self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices"),
        *("seq_lens", "encoder_lens", "scaling"),
        *("enable_gqa", "causal", "is_cross_attn", "sliding_window_size"),
    ),
    f"{_HOST_POOL}.__init__": ("pin_memory",),
    f"{_TORCH_NATIVE}.forward_extend": ("self", "q", "k", "v", "layer"),
    f"{_TORCH_NATIVE}.forward_decode": ("self", "q", "k", "v", "layer"),
    f"{_CONV}.causal_conv1d_fn": (
        *("x", "weight", "bias", "query_start_loc", "cache_indices", "has_initial_state"),
        *("conv_states", "activation", "pad_slot_id"),
    ),
    f"{_CONV}.causal_conv1d_update": (
        *("x", "conv_state", "weight", "bias", "activation", "cache_seqlens"),
        *("conv_state_indices", "pad_slot_id"),
    ),
    f"{_MAMBA_HOST}.MambaPoolHost.__init__": ("pin_memory",),
    _MLA_REGISTER: ("backend_name", "handler_func"),
    _LAYOUT: ("server_args",),
    _BACKENDS: ("server_args",),
    _LORA: ("base_model", "lora_backend"),
    "sglang.srt.arg_groups.overrides.declare_resolution": ("server_args", "source", "fields"),
    "sglang.srt.arg_groups.overrides.resolving_view": (),
}
"""Replaced and called functions of SGLang, with the parameters that each must have in this order. If a
release moved one, the start fails and names it."""

CHECKED_AT_MODEL_LOAD = (_MLA_REGISTER,)
"""Checked before a model with latent attention loads: importing them takes 1.6 s of CPU time."""

_installed = False


def runs_on_cpu_only() -> bool:
    """Return whether SGLang can only run on the CPU: torch finds no CUDA (or ROCm) device."""
    import torch

    return not torch.cuda.is_available()


def install() -> None:
    """Add CPU support to SGLang through its registries and hooks, if `runs_on_cpu_only()`.

    Idempotent. The hooks take effect when SGLang applies them, right after loading its plugins.
    Raises CanopyError naming the missing setting, package or function.
    """
    global _installed
    if _installed or not runs_on_cpu_only():
        return
    _check_environment()
    for path, parameters in CHECKED_FUNCTIONS.items():
        if path not in CHECKED_AT_MODEL_LOAD:
            check_function(path, parameters)

    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from canopy_cpu import hicache, lora, short_conv

    register_attention_backend("torch_native")(_make_backend)
    HookRegistry.register(_BACKENDS, _default_to_torch_native, HookType.BEFORE)
    for pool_class in (_HOST_POOL, f"{_MAMBA_HOST}.MambaPoolHost"):
        HookRegistry.register(f"{pool_class}.__init__", hicache.disable_pinning, HookType.BEFORE)
    HookRegistry.register(_LAYOUT, hicache.replace_kernel_io, HookType.BEFORE)
    HookRegistry.register(_LORA, lora.disable_pinning, HookType.BEFORE)
    short_conv.register_stand_ins()
    for function in (short_conv.causal_conv1d_fn, short_conv.causal_conv1d_update):
        HookRegistry.register(f"{_CONV}.{function.__name__}", function, HookType.REPLACE)
    for name in (_MHA_HOST, _MLA_HOST, _MAMBA_HOST):
        module = importlib.import_module(name)
        for transfer in hicache.TRANSFERS:
            if not hasattr(module, transfer.__name__):
                setattr(module, transfer.__name__, transfer)
    pool = importlib.import_module(_POOL_BASE)
    pool.HICACHE_HOST_MEMORY_RESERVE_BYTES = hicache.RESERVE_BYTES  # type: ignore[attr-defined]
    _installed = True


def check_function(path: str, parameters: tuple[str, ...]) -> None:
    """Raise CanopyError unless `path` can be called with at least these parameters, in order."""
    function = _resolve(path)
    if function is None:
        raise CanopyError(f"{path} is missing: {_INSTALL_ADVICE}")
    names = [name for name in inspect.signature(function).parameters if name in parameters]
    if names != list(parameters):
        raise CanopyError(f"{path} takes ({', '.join(names)}), not {parameters}: {_INSTALL_ADVICE}")


_INSTALL_ADVICE = (
    "Canopy's CPU support is tested with sglang 0.5.22 and 0.5.23; install one of them"
)


def _resolve(path: str) -> Callable[..., Any] | None:
    """Return the function at a dotted path; ``None`` if its module or name is missing."""
    parts = path.split(".")
    for module_length in range(len(parts) - 1, 0, -1):
        try:
            function: Any = importlib.import_module(".".join(parts[:module_length]))
        except ModuleNotFoundError:
            continue
        for name in parts[module_length:]:
            function = getattr(function, name, None)
        return function
    return None


def _check_environment() -> None:
    """Raise CanopyError unless the CPU engine is on and its stand-in for `sgl_kernel` is installed."""
    engine = os.environ.get("SGLANG_USE_CPU_ENGINE")
    if engine != "1":
        raise CanopyError(
            f"SGLANG_USE_CPU_ENGINE is {engine!r} and torch finds no CUDA device: SGLang serves "
            "on a CPU only with SGLANG_USE_CPU_ENGINE=1; set it, or install canopy-sgl-kernel-cpu "
            "(folder sgl-kernel/cpu), which does"
        )
    try:
        importlib.import_module("sgl_kernel")
    except ImportError as error:
        raise CanopyError(
            f"sgl_kernel cannot be imported ({error}): on a CPU install the stand-in with "
            "`pip install --no-deps ./sgl-kernel/cpu`"
        ) from error


def _make_backend(runner: Any) -> Any:
    from canopy_cpu import mla
    from canopy_cpu.attention import NewTokensAttnBackend

    if getattr(runner, "use_mla_backend", False):
        for path in CHECKED_AT_MODEL_LOAD:
            check_function(path, CHECKED_FUNCTIONS[path])
        mla.register_absorbed_form()
    return NewTokensAttnBackend(runner)


def _default_to_torch_native(server_args: Any) -> None:
    """BEFORE hook: SGLang's default on x86 is `intel_amx`, which needs compiled kernels."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.device == "cpu" and view.attention_backend is None:
        declare_resolution(server_args, "canopy_cpu", attention_backend="torch_native")
