"""SGLang's session-aware cache in the simulator, against SGLang's own tree and by hand."""

import random
from types import SimpleNamespace

import pytest

from canopy_lab.sim.system import SystemConfig, TierSpec, simulate_system
from canopy_lab.sim.system.session_refs import SessionAwareLRU, SessionRefs
from canopy_lab.sim.system.tree import TieredTree
from sglang_canopy.errors import CanopyError
from sglang_canopy.records import Request
from support.systems import KV, profile, request

PAGE, BLOCKS = 4, 40
SGLANGS = {"whole_nodes": True, "waiting_prefixes": "touched"}


class Served:
    """The simulator's tree under SGLang's rule."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        self.refs = SessionRefs()
        self.tree = TieredTree(SessionAwareLRU(self.refs), blocks * PAGE, PAGE, whole_nodes=True)
        self.tree.sessions = self.refs
        self.number = 0

    def serve(self, path: tuple[int, ...], session: str | None) -> int:
        """Tokens hit."""
        tree = self.tree
        self.number += 1
        tree.now = float(self.number)
        found = tree.match(path)
        tree.lock(found.node)
        tree.claim((len(path) - found.blocks) * PAGE)
        leaf, _ = tree.insert(path, len(path), len(path) * PAGE)
        tree.lock(leaf, found.node)
        tree.stamp(leaf, Request(time=tree.now, category="a"), self.number)
        self.refs.answered(session, leaf)
        tree.unlock(leaf)
        tree.verify()
        return found.tokens

    def counts(self) -> dict[int, int]:
        return {node.blocks[-1]: self.refs.of(node) for node in self.tree.nodes()}


class SGLangs:
    """SGLang's tree with the option."""

    def __init__(self, blocks: int = BLOCKS) -> None:
        live = pytest.importorskip("support.live_tree")
        self.live = live.LiveTree(
            blocks * PAGE, "lru", page_size=PAGE, core="python", sessions=True
        )

    def serve(self, path: tuple[int, ...], session: str | None) -> int:
        tokens = [block for block in path for _ in range(PAGE)]
        hit = self.live.match(tokens)
        result = self.live.insert(tokens)
        if session is not None:
            refs = self.live.cache.session_refs
            req = SimpleNamespace(session_id=session, session=None,
                                  session_generation=refs.ensure_session_generation(session))  # fmt: skip
            refs.register_session_ref(req, leaf=result.last_device_node)
        return hit

    def close(self, session: str) -> None:
        self.live.cache.release_radix_session(session)
        self.live.cache.open_radix_session(session)

    def counts(self) -> dict[int, int]:
        core = self.live.core
        data = core.components[0].component_type
        return {
            node.key.raw_token_ids()[-1]: node.component_data[data].session_ref
            for node in core._node_arena.values()
            if node is not core.root_node
        }


def steps(seed: int) -> list[tuple[tuple[int, ...], str | None, bool]]:
    """Conversations that grow by whole nodes, under their own and under shared names."""
    draw = random.Random(seed)
    talks: dict[int, tuple[int, ...]] = {}
    made = []
    for _ in range(160):
        who = draw.randrange(9)
        path = talks.get(who, ()) + tuple(draw.sample(range(10, 10**6), draw.randint(1, 4)))
        talks[who] = path
        if len(path) > BLOCKS // 2:
            del talks[who]
            continue
        session = draw.choice([None, f"s{who}", f"s{who}", f"s{who % 3}"])
        made.append((path, session, draw.random() < 0.1))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_hits_and_counts_are_those_of_sglangs_own_tree(seed: int) -> None:
    """SGLang refreshes the rest of a node when it splits it, so no talk branches off inside one."""
    ours, theirs, most = Served(), SGLangs(), 0
    for path, session, closes in steps(seed):
        assert ours.serve(path, session) == theirs.serve(path, session)
        if closes and session is not None:
            ours.refs.close(session)
            theirs.close(session)
        assert ours.counts() == theirs.counts()
        most = max(most, *theirs.counts().values())
    assert most > 1


@pytest.mark.parametrize("seed", range(4))
def test_branches_of_several_sessions_are_evicted_as_in_sglangs_tree(seed: int) -> None:
    draw = random.Random(seed)
    ours, theirs = Served(BLOCKS * 10), SGLangs(BLOCKS * 10)
    paths: list[tuple[int, ...]] = [()]
    for _ in range(25):
        path = draw.choice(paths) + tuple(draw.sample(range(10, 10**6), 2))
        paths.append(path)
        session = draw.choice([None, "a", "b", "c"])
        ours.serve(path, session)
        theirs.serve(path, session)
    assert ours.counts() == theirs.counts()
    for left in range(24, -1, -1):
        if left == 12:
            ours.refs.close("b")
            theirs.close("b")
        ours.tree.evict_device(1)
        theirs.live.evict(1)
        assert ours.counts() == theirs.counts()
        assert len(ours.counts()) == left


def test_a_split_node_counts_as_before_and_a_deleted_one_hands_its_session_up() -> None:
    ours = Served()
    ours.serve((1, 2, 3, 4), "a")
    ours.serve((1, 2, 5), "b")
    assert ours.counts() == {2: 2, 4: 1, 5: 1}
    ours.refs.close("b")
    ours.tree.evict_device(1)  # uncounted nodes are evicted before older ones
    assert ours.counts() == {2: 1, 4: 1}
    ours.tree.evict_device(1)
    assert ours.counts() == {2: 1}
    ours.refs.close("a")
    assert ours.counts() == {2: 0}


def talks() -> list:
    """One talk in turns, and others of one turn that push it out."""
    made = [request(0.0, range(1, 11), conversation="long", turn=1)]
    for i in range(4):
        path = range(100 * (i + 1), 100 * (i + 1) + 10)
        made.append(request(1.0 + i, path, conversation=f"once {i}", turn=1))
    made.append(request(9.0, range(1, 13), conversation="long", turn=2))
    return made


def test_closing_keeps_the_continuing_sessions() -> None:
    hits = {}
    for how in ("off", "kept", "closed"):
        config = SystemConfig(device_tokens=350, session_refs=how, **SGLANGS)
        hits[how] = simulate_system(talks(), config, profile()).cached_tokens[-1]
    assert hits == {"off": 0, "kept": 0, "closed": 100}


def test_the_host_is_ranked_the_same_and_all_requests_are_served() -> None:
    host = TierSpec(400 * KV, 1e9, 1e9)
    config = SystemConfig(device_tokens=250, host=host, session_refs="closed", **SGLANGS)
    result = simulate_system(talks(), config, profile())
    assert result.cached_tokens[-1] == 100
    assert (result.ttft_s > 0).all()


def test_it_needs_sglangs_own_cache() -> None:
    with pytest.raises(CanopyError, match="it goes with device_policy 'lru' and whole_nodes"):
        SystemConfig(device_tokens=100, session_refs="kept", device_policy="wa")
