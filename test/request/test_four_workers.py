"""Four workers behind each gateway: every request is served, tenants arrive, a key stays on a worker.
The simulator's router has the constants of the real routers."""

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from canopy_lab.sim.system import routing
from support.gateways import FOLDER, MODULES, Worker, post, running, skip_without

BY_KEY = {"smg": ("round_robin", "--routing-key-override"), "sglang-router": ("manual",)}


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    four = [Worker() for _ in range(4)]
    yield four
    for worker in four:
        worker.close()


def complete(url: str, workers: list[Worker], key: str, n: int, salt: str = "a") -> list[int]:
    """Send ``n`` turns of a conversation. Returns which worker got each."""
    got = []
    for turn in range(n):
        for worker in workers:
            worker.seen.clear()
        body = {"model": "tiny", "prompt": f"{key} says hello", "max_tokens": 4}
        body |= {"cache_salt": salt, "rid": f"{key}_t{turn}"}
        assert post(f"{url}/v1/completions", body, {"x-smg-routing-key": key})[0] == 200
        ((at, seen),) = [(i, w.seen) for i, w in enumerate(workers) if w.seen]
        ((_, _, arrived),) = seen
        assert arrived["cache_salt"] == salt
        assert arrived["rid"] == f"{key}_t{turn}"
        got.append(at)
    return got


@pytest.mark.parametrize("gateway", sorted(MODULES))
def test_round_robin_spreads_a_conversation(gateway, workers, tmp_path) -> None:
    urls = [worker.url for worker in workers]
    with running(gateway, urls, tmp_path / "log") as url:
        assert Counter(complete(url, workers, "c", 8)) == dict.fromkeys(range(4), 2)


@pytest.mark.parametrize("gateway", sorted(MODULES))
def test_a_routing_key_stays_on_one_worker_and_keys_use_several(gateway, workers, tmp_path) -> None:
    policy, *more = BY_KEY[gateway]
    urls = [worker.url for worker in workers]
    with running(gateway, urls, tmp_path / "log", *more, policy=policy) as url:
        places = [set(complete(url, workers, f"conversation-{n}", 3)) for n in range(12)]
    assert all(len(place) == 1 for place in places)
    assert len(set().union(*places)) > 1


@pytest.mark.parametrize("gateway", sorted(MODULES))
def test_the_simulators_router_has_the_constants_of_the_real_one(gateway, monkeypatch) -> None:
    skip_without(gateway)
    monkeypatch.setattr(sys, "path", [os.environ.get(FOLDER, ""), *sys.path])
    real = importlib.import_module(f"{MODULES[gateway]}.router_args").RouterArgs
    assert real.policy == "cache_aware"
    assert real.cache_threshold == routing.MATCH_SHARE
    assert real.balance_abs_threshold == routing.IMBALANCE_REQUESTS
    assert real.balance_rel_threshold == routing.IMBALANCE_RATIO
    characters_a_block = 16 * 4
    assert real.max_tree_size == routing.BLOCKS_KEPT * characters_a_block
