"""Scenarios of two ranks of tensor parallelism with MLA: SGLang's own controllers over our disk tier.

Each rank writes a path of pages, looks it up as the ranks agree, and reads it; after a restart it only reads.
"""

import hashlib
import threading
from pathlib import Path
from typing import Any

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

import canopy_cpu as cpu
from sglang_canopy.storage.settings import DYNAMIC_BACKEND

RANKS = 2
PAGE, PAGES, WAIT_S = 4, 6, 60
LAYOUT = "page_first_direct"
TOKENS = list(range(100, 100 + PAGE * PAGES))


def publish(size: int) -> None:
    set_global_server_args_for_scheduler(
        ServerArgs(model_path="dummy", page_size=PAGE, hicache_mem_layout=LAYOUT, tp_size=size)
    )


def controller_of(folder: str, group) -> HiCacheController:
    cpu.install()
    HookRegistry.apply_hooks()
    device_pool = MLATokenToKVPool(
        size=PAGE * PAGES,
        page_size=PAGE,
        dtype=torch.float16,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )
    host_pool = MLATokenToKVPoolHost(
        device_pool.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE,
        LAYOUT,
        device_capacity_tokens=device_pool.size,
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
        target_layer_num=device_pool.layer_num,
        host_token_capacity=3 * PAGE * PAGES,
    )
    allocator = PagedTokenToKVPoolAllocator(
        PAGE * PAGES, PAGE, dtype=torch.float16, device="cpu", kvcache=device_pool, need_sort=False
    )
    extra = {"path": folder, "capacity_bytes": 10**6, "sweep_s": 3600, **DYNAMIC_BACKEND}
    return HiCacheController(
        allocator,
        host_pool,
        PAGE,
        tp_group=group,
        load_cache_event=threading.Event(),
        io_backend="direct",
        storage_backend="dynamic",
        model_name="mla",
        storage_backend_extra_config=extra,
    )


def keys() -> list[str]:
    return get_storage_hash_str(TOKENS, None, page_size=PAGE)


def write(controller: HiCacheController) -> None:
    pool = controller.mem_pool_host
    pool.kv_buffer.copy_(torch.arange(pool.kv_buffer.numel()).reshape(pool.kv_buffer.shape) % 2048)
    controller.write_storage(torch.arange(PAGE * PAGES), TOKENS, hash_value=keys())
    controller.ack_backup_queue.get(timeout=WAIT_S)


def look_up(controller: HiCacheController) -> int:
    """Tokens that every rank has, as SGLang's ranks agree on them."""
    controller.prefetch("request", TOKENS)
    return controller.prefetch_hit_queue.get(timeout=WAIT_S).storage_hit_count


def read(controller: HiCacheController) -> str:
    """Return a digest of the pages read."""
    pool = controller.mem_pool_host
    pool.kv_buffer.zero_()
    at = torch.arange(PAGE * PAGES, 2 * PAGE * PAGES)
    assert all(controller.storage_backend.batch_get_v1(keys(), at)), "a page did not come back"
    data = [pool.get_data_page(int(i), flat=True) for i in at[::PAGE]]
    return hashlib.sha256(torch.cat(data).numpy().tobytes()).hexdigest()


def placed(rank: int):
    """Set the rank's placement, as a scheduler process does."""
    names = ("pp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank")
    return get_parallel().override(tp_rank=rank, attn_tp_rank=rank, **dict.fromkeys(names, 0))


def written_and_read(rank: int, folder: Path, writes: bool = True) -> dict[str, Any]:
    """The disk is beside ``folder``, in which the ranks meet."""
    publish(RANKS)
    with placed(rank):
        controller = controller_of(str(folder.parent / "disk"), torch.distributed.group.WORLD)
        if writes:
            write(controller)
        torch.distributed.barrier()
        found = {"tokens": look_up(controller), "kv": read(controller)}
        found["unavailable"] = controller.storage_backend.status()["unavailable"]
        torch.distributed.barrier()
        controller.detach_storage_backend()
    return found


def read_again(rank: int, folder: Path) -> dict[str, Any]:
    return written_and_read(rank, folder, writes=False)
