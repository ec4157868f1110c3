"""A disk tier attached to, detached from and attached again to a tree that holds prompts already."""

from pathlib import Path

import pytest

from sglang_canopy.server.start.seams import SEAMS
from support.disk_tree import DiskTree
from support.live_tree import check

BOTH = pytest.mark.parametrize("write_policy", ["write_through", "write_back"])


def tokens(name: int, count: int) -> list[int]:
    return [name * 100 + i for i in range(count)]


@pytest.fixture
def tree(tmp_path: Path, request: pytest.FixtureRequest):
    """A tree without storage that has the prompt ``tokens(1, 16)`` on the device and the host."""
    policy = getattr(request, "param", "write_through")
    tree = DiskTree(tmp_path / "first", tokens=64, host_tokens=256, write_policy=policy)
    tree.detach()
    tree.serve([*tokens(1, 16), 1, 2], 1.0)
    yield tree
    tree.close()


WRITES_BOTH = pytest.mark.parametrize("tree", ["write_through", "write_back"], indirect=True)


def flood(tree: DiskTree, time: float) -> None:
    """Evict the rest from the device, so that ``write_back`` copies it down."""
    for name in range(20, 24):
        tree.serve(tokens(name, 32), time)


@WRITES_BOTH
def test_a_new_request_takes_the_prompt_below_which_it_is_to_disk(tree, tmp_path):
    assert tree.attach(tmp_path / "second") is None
    path = tokens(1, 16) + tokens(2, 4)
    tree.serve(path, 2.0)
    flood(tree, 3.0)
    assert tree.on_disk(path) == 20
    check(tree)


def test_a_prompt_that_is_used_again_reaches_the_disk(tree, tmp_path):
    assert tree.attach(tmp_path / "second") is None
    tree.serve(tokens(1, 16), 2.0)
    tree.request(3.0)
    tree.settle()
    assert tree.on_disk(tokens(1, 16)) == 16
    check(tree)


def test_another_folder_receives_the_same_pages(tree, tmp_path):
    path = tokens(1, 16) + tokens(2, 4)
    assert tree.attach(tmp_path / "second") is None
    tree.serve(path, 2.0)
    tree.detach()
    assert tree.attach(tmp_path / "third") is None
    tree.serve(path + tokens(3, 4), 3.0)
    assert tree.on_disk(path + tokens(3, 4)) == 24
    tree.detach()
    assert tree.attach(tmp_path / "second") is None
    assert tree.on_disk(path) == 20
    check(tree)


def test_a_long_path_of_many_nodes_is_written_from_its_head_on(tmp_path):
    tree = DiskTree(tmp_path / "first", tokens=2048, host_tokens=4096)
    tree.detach()
    path: list[int] = []
    for turn in range(200):
        path += tokens(turn, 2)
        tree.serve(path, 1.0 + turn)
    assert tree.attach(tmp_path / "second") is None
    tree.serve(path + tokens(400, 2), 1000.0)
    assert tree.on_disk(path + tokens(400, 2)) == len(path) + 2
    tree.close()


def test_an_attached_disk_has_the_options_of_the_start(tree, tmp_path):
    assert tree.attach(tmp_path / "second", policy="wa", policy_config={"min_samples": 7}) is None
    assert tree.store.policy.config.min_samples == 7


@pytest.mark.parametrize(
    ("extra", "part"),
    [({"sweep_s": -1}, "sweep_s"), ({"policy": "none"}, "none"), ({"pth": "x"}, "pth")],
)
def test_options_that_are_wrong_are_refused_and_change_nothing(tree, tmp_path, extra, part):
    assert part in tree.attach(tmp_path / "second", **extra)
    assert not tree.cache.enable_storage
    assert tree.attach(tmp_path / "second") is None


def test_the_attach_of_sglang_is_hooked():
    assert any(seam.target.endswith("UnifiedRadixCache.attach_storage_backend") for seam in SEAMS)
