"""Copies between the pools of SGLang's own host pool class, with CPU support installed."""

import pytest
import torch
from sglang.srt.mem_cache.pool_host import mha
from sglang.srt.plugins.hook_registry import HookRegistry

import canopy_cpu as cpu
from canopy_cpu import hicache

LAYERS, PAGE_TOKENS, HEADS, DIM = 3, 4, 2, 8
DEVICE_TOKENS, HOST_PAGES = 40, 9


@pytest.fixture(scope="module", autouse=True)
def installed():
    cpu.install()
    HookRegistry.apply_hooks()


def device_layers():
    elements = LAYERS * DEVICE_TOKENS * HEADS * DIM
    return list(torch.arange(elements, dtype=torch.float32).view(LAYERS, DEVICE_TOKENS, HEADS, DIM))


def slots_of(pages):
    return torch.tensor([page * PAGE_TOKENS + i for page in pages for i in range(PAGE_TOKENS)])


def test_pages_survive_a_page_first_host_pool():
    keys = device_layers()
    values = [-layer for layer in keys]
    host = [torch.zeros(HOST_PAGES, LAYERS, PAGE_TOKENS, HEADS, DIM) for _ in range(2)]
    source, target = slots_of([5, 0, 7]), slots_of([8, 3, 1])
    hicache.transfer_kv_all_layer_direct_lf_pf([*keys, *values], host, source, target, PAGE_TOKENS)
    assert torch.equal(host[0][8, 1], keys[1][5 * PAGE_TOKENS : 6 * PAGE_TOKENS])
    assert host[0][0].abs().sum() == 0

    loaded = slots_of([2, 9, 4])
    for layer in range(LAYERS):
        k, v = torch.zeros_like(keys[0]), torch.zeros_like(keys[0])
        hicache.transfer_kv_per_layer_direct_pf_lf(host, [k, v], target, loaded, layer, PAGE_TOKENS)
        assert torch.equal(k[loaded], keys[layer][source])
        assert torch.equal(v[loaded], values[layer][source])


def test_tokens_survive_a_layer_first_host_pool():
    keys = device_layers()
    host_pools = [torch.zeros(HOST_PAGES * PAGE_TOKENS, HEADS, DIM) for _ in keys]
    source_slots, target_slots = torch.tensor([3, 30, 4]), torch.tensor([11, 0, 35])
    hicache.transfer_kv_direct(keys, host_pools, source_slots, target_slots, 1)
    loaded = [torch.zeros_like(layer) for layer in keys]
    hicache.transfer_kv_direct(host_pools, loaded, target_slots, source_slots, 1)
    for layer, copy in zip(keys, loaded):
        assert torch.equal(copy[source_slots], layer[source_slots])
        assert copy.count_nonzero() <= layer[source_slots].numel()


def test_sglangs_host_pool_finds_the_copies_and_pins_nothing():
    for transfer in hicache.TRANSFERS:
        assert getattr(mha, transfer.__name__) is transfer
    pinned = {}

    class Pool(mha.HostKVCache):
        def init_kv_buffer(self):
            pinned["value"] = self.pin_memory
            return torch.empty(1)

        get_size_per_token = load_to_device_per_layer = backup_from_device_all_layer = None
        get_data_page = get_dummy_flat_data_page = set_from_flat_data_page = None
        layer_num = target_layer_num = 1

    Pool(
        dtype=torch.float32,
        device_capacity_tokens=8,
        size_per_token=4,
        start_layer=0,
        end_layer=1,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=1,
        layout="layer_first",
        pin_memory=True,
        device="cpu",
    )
    assert pinned["value"] is False


def test_the_host_pool_leaves_one_gibibyte_free_on_a_small_machine(monkeypatch):
    from sglang.srt.mem_cache.pool_host import base

    monkeypatch.setattr(base, "available_host_memory_bytes", lambda **_: 4 << 30)
    assert base.host_memory_budget_bytes() == 3 << 30
