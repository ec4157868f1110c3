"""A host pool of SGLang's own class on CPU memory, as its controller passes it to a storage backend."""

import hashlib
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

import canopy_cpu as cpu

LAYER_COUNT = 3


def host_pool(
    page_count: int, layout: str = "page_first_direct", *, page_tokens: int = 4, head_count: int = 2
) -> Any:
    """Return a float16 pool of 3 layers, and heads of 8 values: a page has 96 * tokens * heads bytes."""
    server_args = ServerArgs(model_path="dummy", page_size=page_tokens, hicache_mem_layout=layout)
    set_global_server_args_for_scheduler(server_args)
    cpu.install()
    HookRegistry.apply_hooks()
    device_pool = MHATokenToKVPool(
        size=page_tokens,
        page_size=page_tokens,
        dtype=torch.float16,
        head_num=head_count,
        head_dim=8,
        layer_num=LAYER_COUNT,
        device="cpu",
        enable_memory_saver=False,
    )
    if not hasattr(hybrid_pool_assembler, "_mha_host_inputs"):
        # 0.5.22 adds a page, and has no pool with fewer pages than layers.
        pool_class = hybrid_pool_assembler.get_mha_host_pool_cls(device_pool)
        return pool_class(device_pool, max(page_count, LAYER_COUNT) - 1, 0, page_tokens, layout)
    pool_tokens = page_count * page_tokens
    pool_class, layout_info, options = hybrid_pool_assembler._mha_host_inputs(device_pool)
    return pool_class(
        layout_info, 1.0, 0, page_tokens, layout, host_token_capacity=pool_tokens, **options
    )


def storage_config(extra_config: dict[str, Any] | None, **fields: Any) -> HiCacheStorageConfig:
    """Return the configuration of a single rank."""
    config_fields: dict[str, Any] = {"model_name": "model", "extra_config": extra_config}
    for group in ("tp", "pp", "attn_cp"):
        config_fields |= {f"{group}_rank": 0, f"{group}_size": 1}
    for name in ("is_mla_model", "enable_storage_metrics", "is_page_first_layout"):
        config_fields[name] = False
    return HiCacheStorageConfig(**{**config_fields, **fields})


def token_indices(pool: Any, pages: list[int]) -> torch.Tensor:
    """Host indices of whole pages, as the controller passes them."""
    page_tokens = pool.page_size
    return torch.tensor([page * page_tokens + i for page in pages for i in range(page_tokens)])


def page_hashes(prefix: str, count: int) -> list[str]:
    """Return unique page hashes in SGLang's form."""
    return [hashlib.sha256(f"{prefix}{i}".encode()).hexdigest() for i in range(count)]
