"""Decisions depend on the requests' stamps alone, so that the ranks of a replica decide alike."""

import ast
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_canopy
from support.live_tree import LiveTree, check_tree

DECISION_FOLDERS = ("admission", "policy", "radix", "reuse", "schedule", "ttl", "whatif")
IMPURE_MODULES = {"time", "datetime", "random", "secrets", "uuid"}
EXEMPT_FILES = {
    "radix/self_test.py",
    "radix/storage_holds.py",
    "radix/tier_self_test.py",
    "whatif/meter.py",
}
"""The meter measures its own cost; the ranks agree when a wait for the storage ends; the self-tests have
fixed seeds."""

CAPACITY_TOKENS = 24
PATHS = [[number * 100 + i for i in range(8)] for number in range(6)]
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 5), st.floats(0.0, 3.0), st.sampled_from(["chat", "agent"])),
    min_size=4,
    max_size=30,
)


@given(ARRIVALS)
def test_ranks_agree_and_time_never_decreases(arrivals) -> None:
    """``delay_s``: seconds between a request's stamp and the scheduler."""
    rank_trees = [LiveTree(CAPACITY_TOKENS, "wa", {"block_tokens": 4}) for _ in range(2)]
    for tree in rank_trees:
        times_s = []
        for second, (path_number, delay_s, category) in enumerate(arrivals):
            time, prompt_tokens = second - delay_s + 10.0, len(PATHS[path_number])
            request = tree.request(time, category=category, prompt_tokens=prompt_tokens)
            times_s.append(request.time)
            tree.core.requests.finish(request)
            tree.insert(PATHS[path_number], request)
        assert times_s == sorted(times_s)
        assert times_s[-1] == tree.core.clock.now
        check_tree(tree)
    assert len({tree.core.live.counters.victim_digest.count_and_digest for tree in rank_trees}) == 1
    assert len({tuple(tree.match(path) for path in PATHS) for tree in rank_trees}) == 1


@pytest.mark.parametrize("folder", DECISION_FOLDERS)
def test_decisions_read_no_clock_and_draw_no_random_number(folder) -> None:
    """Ranks differ in speed, so a time limit would stop them at different points."""
    root = Path(sglang_canopy.__file__).parent
    for path in sorted((root / folder).rglob("*.py")):
        imported_names = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported_names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported_names.add((node.module or "").partition(".")[0])
        file_name = str(path.relative_to(root))
        assert file_name in EXEMPT_FILES or not imported_names & IMPURE_MODULES, file_name
