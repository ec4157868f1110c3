"""The patch of docs/upstream.md: it applies to the pinned SGLang, and the page counts right."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")
import sglang

from sglang_canopy.server.start import digests

ROOT = Path(__file__).resolve().parents[2]
PATCH = ROOT / "docs" / "upstream.patch"
PAGE = (ROOT / "docs" / "upstream.md").read_text(encoding="utf-8")
INSTALLED = Path(sglang.__path__[0])
CORE = "srt/mem_cache/unified_cache/unified_tree_core.py"
FULL = "srt/mem_cache/unified_cache/components/full.py"
TOUCHED = {CORE, FULL, "srt/mem_cache/utils.py"}
NEW = "srt/mem_cache/unified_cache/tree_observer.py"


def apply_to(folder: Path) -> None:
    """Apply the patch to the package ``sglang`` below ``folder``."""
    command = ["git", "apply", "--unidiff-zero", str(PATCH)]
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)


def added() -> dict[str, int]:
    """Lines that the patch adds, by file."""
    found: dict[str, int] = {}
    file = ""
    for line in PATCH.read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ b/sglang/"):
            file = line.removeprefix("+++ b/sglang/")
        elif line.startswith("+"):
            found[file] = found.get(file, 0) + 1
    return found


def test_it_applies_to_the_installed_release(tmp_path) -> None:
    for name in TOUCHED:
        (tmp_path / "sglang" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(INSTALLED / name, tmp_path / "sglang" / name)
    apply_to(tmp_path)
    assert set(added()) == {*TOUCHED, NEW}
    for name in added():
        source = (tmp_path / "sglang" / name).read_text(encoding="utf-8")
        compile(source, name, "exec")


def test_it_holds_no_line_of_sglangs() -> None:
    lines = PATCH.read_text(encoding="utf-8").splitlines()
    head = ("diff --git ", "new file mode ", "--- ", "+++ ", "@@ ")
    assert [line for line in lines if not line.startswith((*head, "+"))] == []


def test_the_page_states_the_true_counts() -> None:
    lines = added()
    assert f"{sum(lines.values())} lines" in PAGE
    assert f"{lines[NEW]} of them" in PAGE
    table = digests.read_table()
    replaced = re.findall(r"^- `(UnifiedTreeCore|FullComponent)`: (.+)$", PAGE, re.M)
    names = {f"{owner}.{name}" for owner, some in replaced for name in re.findall(r"`(\w+)`", some)}
    assert names <= {*table[CORE]["names"], *table[FULL]["names"]}
    assert f"These {len(names)} functions and one hook" in PAGE


RUN = """
import dataclasses, json, random, unittest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_cache import tree_observer
from sglang.test.kits.unified_radix_cache import config, fixtures, mixins

class Oldest(tree_observer.TreeObserver):
    ranks = True
    made = []

    def __init__(self, params, core):
        self.core = core
        Oldest.made.append(self)

    def reset(self):
        self.leaves, self.nodes = set(), set()

    def node_added(self, node):
        self.nodes.add(node.id)

    def node_split(self, head, tail):
        self.nodes.add(head.id)

    def node_removed(self, node):
        self.nodes.discard(node.id)
        self.leaves.discard(node)

    def evictable(self, node, device, host):
        (self.leaves.add if device else self.leaves.discard)(node)

    def next_victim(self, tier, need_tokens):
        oldest = min(self.leaves, key=lambda n: n.last_access_time, default=None)
        return oldest and tree_observer.Victim(oldest)

tree_observer.register_tree_observer("oldest", Oldest)
(cfg,) = [c for c in config.CONFIGS if len(c.components) == 1][:1]

def run(policy):
    suite = type("S", (mixins.UnifiedRadixCacheFixtures, unittest.TestCase), {"runTest": print})()
    suite.cfg = dataclasses.replace(cfg, eviction_policy=policy)
    cache, allocator, pool = fixtures.build_fixture(suite.cfg)
    draw, asked, found = random.Random(3), [], []
    for at in range(60):
        head = draw.choice(asked) if asked and draw.random() < 0.5 else []
        head = head[: cfg.page_size * draw.randrange(1, 4)]
        tokens = head + suite._make_seq(1000 * at + 7, draw.randrange(1, 4))
        asked.append(tokens)
        suite._insert(cache, allocator, pool, tokens)
        if at % 3 == 2:
            cache.evict(EvictParams(num_tokens=2 * cfg.page_size))
            found.append([fixtures.match_prefix(cache, t).device_prefix_len for t in asked[-9:]])
    return cache, found

_, theirs = run("lru")
cache, ours = run("oldest")
(observer,) = Oldest.made
core = cache.tree_core
print(json.dumps({
    "same": ours == theirs, "evictions": len(ours), "hits": sum(map(sum, ours)),
    "nodes": observer.nodes == set(core._node_arena) - {core.root_node.id},
    "leaves": observer.leaves == core.evictable_device_leaves,
}))
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_with_it_an_observer_of_the_oldest_evicts_as_sglangs_lru_does(tmp_path) -> None:
    """On SGLang's own kit, in a patched copy: the rest of the package is linked."""
    shutil.copytree(INSTALLED, tmp_path / "sglang", copy_function=os.symlink)
    for name in TOUCHED:
        (tmp_path / "sglang" / name).unlink()
        shutil.copy2(INSTALLED / name, tmp_path / "sglang" / name)
    apply_to(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", RUN],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("hits") > 0
    assert found == {"same": True, "evictions": 20, "nodes": True, "leaves": True}
