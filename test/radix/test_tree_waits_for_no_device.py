"""Match, insert, evict, back up and load back with the pool's slots on a device: the tree, and the tier
in the host's memory, never wait for it."""

import random
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from support.live_tree import LiveTree  # noqa: E402
from support.separate_device import DEVICE, HostSync, SeparateDevice, There, inside  # noqa: E402

SLOTS, STEPS = 2048, 60


def on_the_device(policy: str, page: int, device: SeparateDevice, **host: Any) -> LiveTree:
    """Return a tree with its slots and its allocator's on the separate device."""
    tree = LiveTree(SLOTS, policy, {"quantum_tokens": page}, page_size=page, **host)
    tree.compute = lambda *about: None
    for part in (tree.core, tree.cache, tree.allocator, *tree.core.components):
        for name, value in list(vars(part).items()):
            if name in ("device", "_device"):
                setattr(part, name, DEVICE)
            elif isinstance(value, torch.Tensor):
                setattr(part, name, device.put(value))
    if tree.cache.cache_controller is not None:
        copy_by_kernels(tree.cache.cache_controller)
    return tree


def copy_by_kernels(controller: Any) -> None:
    """Copy as on CUDA: SGLang passes the slots of both sides to kernels on the device."""
    controller.io_backend, controller.device = "kernel", DEVICE
    engine = controller.l2_transfer_engine
    names = ("submit_device_to_host", "submit_host_to_device")
    real = {name: getattr(engine, name) for name in names}

    def copied(name: str, transfers: list[Any], **about: Any) -> Any:
        assert all(isinstance(t.device_indices, There) for t in transfers)
        return real[name](
            [
                t._replace(
                    host_indices=inside(t.host_indices), device_indices=inside(t.device_indices)
                )
                for t in transfers
            ],
            **about,
        )

    for name in names:
        setattr(engine, name, partial(copied, name))


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("policy", ["canopy-lru", "wa"])
def test_the_tree_waits_for_no_device(policy, page) -> None:
    device = SeparateDevice()
    tree, draw = on_the_device(policy, page, device), random.Random(1)
    heads = [[draw.randrange(1000) for _ in range(64)] for _ in range(6)]
    evictions = 0
    with device:
        for i in range(STEPS):
            ids = heads[i % 6] + [draw.randrange(1000) for _ in range(64)]
            tree.match(ids)
            if tree.allocator.available_size() < 256:
                tree.evict(192)
                evictions += 1
            tree.insert(ids)
            assert tree.match(ids)
    assert evictions > 5


@pytest.mark.parametrize(
    ("write", "page"),
    [
        ("write_through", 16),
        ("write_back", 1),
        pytest.param("write_through", 1, marks=pytest.mark.long),
        pytest.param("write_back", 16, marks=pytest.mark.long),
    ],
)
def test_the_host_tier_waits_for_no_device(write, page) -> None:
    """Nodes are written to the host, evicted there, and loaded; SGLang waits for its copies' events and
    reads no slot."""
    device = SeparateDevice()
    tree = on_the_device("wa", page, device, host_tokens=2 * SLOTS, write_policy=write)
    draw = random.Random(1)
    asked = [[draw.randrange(1000) for _ in range(128)] for _ in range(40)]
    whole = 0
    with device:
        for _ in range(3 * STEPS):
            ids = asked[min(draw.randrange(40), draw.randrange(40))]
            whole += tree.load_back(ids) == tree.match(ids) == len(ids)
            if tree.allocator.available_size() < 256:
                tree.evict(192)
            tree.insert(ids)
    assert whole > 5, "prompts came back from the host"


def test_reads_of_device_slots_by_the_host_are_detected() -> None:
    """SGLang makes such copies with `--hicache-io-backend direct`."""
    device = SeparateDevice()
    tree = on_the_device("wa", 1, device, host_tokens=SLOTS)
    tree.cache.cache_controller.io_backend = "direct"
    with device, pytest.raises(HostSync, match="copy between host and device"):
        tree.insert(list(range(64)))
