"""Match, insert and evict with the pool's slots on a device: the tree never waits for it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from support import separate_device  # noqa: E402
from support.live_tree import LiveTree  # noqa: E402
from support.separate_device import DEVICE, HostSync, SeparateDevice  # noqa: E402

SLOTS, STEPS, MOST = 2048, 60, {"match": 1, "evict": 12, "insert": 12}
"""Of one call at most so many operations on the device, on average."""


def on_the_device(policy: str, page: int, device: SeparateDevice) -> LiveTree:
    """A tree whose slots, and those of its allocator, are on the separate device."""
    tree = LiveTree(SLOTS, policy, {"quantum_tokens": page}, page_size=page)
    tree.compute = lambda *about: None
    for part in (tree.core, tree.cache, tree.allocator, *tree.core.components):
        for name, value in list(vars(part).items()):
            if name in ("device", "_device"):
                setattr(part, name, DEVICE)
            elif isinstance(value, torch.Tensor):
                setattr(part, name, device.put(value))
    return tree


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_the_tree_waits_for_no_device(policy, page) -> None:
    device = SeparateDevice()
    tree, draw = on_the_device(policy, page, device), random.Random(1)
    heads = [[draw.randrange(1000) for _ in range(64)] for _ in range(6)]
    calls: Counter[str] = Counter()
    launched: Counter[str] = Counter()

    def call(name, work, *about):
        device.operations.clear()
        work(*about)
        calls[name] += 1
        launched[name] += sum(device.operations.values())

    with device:
        for i in range(STEPS):
            ids = heads[i % 6] + [draw.randrange(1000) for _ in range(64)]
            call("match", tree.match, ids)
            if tree.allocator.available_size() < 256:
                call("evict", tree.evict, 192)
            call("insert", tree.insert, ids)
            call("match", tree.match, ids)
    assert calls["evict"] > 5
    assert {name: launched[name] / calls[name] <= MOST[name] for name in MOST} == dict.fromkeys(
        MOST, True
    ), launched


def test_a_tree_that_reads_its_slots_would_be_seen() -> None:
    device = SeparateDevice()
    tree = on_the_device("canopy-lru", 1, device)
    assert isinstance(tree.allocator.free_pages, separate_device.There)
    with device, pytest.raises(HostSync):
        int(tree.allocator.free_pages[0])
