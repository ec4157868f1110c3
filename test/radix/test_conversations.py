"""Named conversations: their nodes, waits for children, and bounds of memory."""

from hypothesis import given
from hypothesis import strategies as st

from support.live_tree import LiveTree, check, fake_req


def begin(tree: LiveTree, prompt: list[int], time: float, salt: str | None = None, **stamp: object):
    """A request as SGLang's hooks would report it; its end is to be called. The answer is two
    tokens."""
    answer = [prompt[-1] + 500_000, prompt[-1] + 500_001]
    req = fake_req(prompt, answer, {"time": time, **stamp}, cache_salt=salt)
    request = tree.core.requests.register(req)

    def end():
        tree.core.requests.ended(req)
        tree.insert([*prompt, *answer], request, salt)
        return request

    return end


def ask(tree: LiveTree, prompt: list[int], time: float, salt: str | None = None, **stamp: object):
    """One whole request."""
    return begin(tree, prompt, time, salt, **stamp)()


def test_one_prompt_under_ever_new_names_grows_nothing() -> None:
    tree = LiveTree(256, "wa")
    for n in range(2000):
        ask(tree, [1, 2, 3, 4], float(n), conversation=f"made-up-{n}")
    assert len(tree.core.conversations) <= 2 * len(tree.core._node_arena) + 64
    check(tree)


SYSTEM = list(range(100, 108))


def branches(linear: bool, prompts: list[list[int]], **config: object) -> LiveTree:
    tree = LiveTree(512, "wa", {"quantum_tokens": 1, "block_tokens": 4, **config})
    for n, prompt in enumerate(prompts):
        ask(tree, prompt, float(n), conversation="c", linear=linear)
    return tree


def over(tree: LiveTree) -> set[int]:
    """The tokens that rank as over."""
    nodes = tree.core._node_arena.values()
    return {t for node in nodes if node.canopy.over for t in node.key.raw_token_ids()}


TURN_1 = [*SYSTEM, *range(200, 220)]
COMPACTED = [*SYSTEM, *range(300, 310)]


def test_a_branch_abandoned_by_compaction_ranks_as_over() -> None:
    tree = branches(True, [TURN_1, COMPACTED])
    assert over(tree) >= set(range(200, 220))
    assert not over(tree) & {*SYSTEM, *COMPACTED}
    tree.evict(10)
    assert tree.match(COMPACTED) == len(COMPACTED)
    assert tree.match(TURN_1) < len(TURN_1)
    check(tree)


def test_a_request_that_ends_its_session_ends_the_conversations_kv() -> None:
    tree = branches(True, [TURN_1])
    assert not over(tree)
    ask(tree, [7, 7, 7], 5.0, conversation="c", linear=True, over=True)
    assert set(TURN_1) <= over(tree)


def test_a_users_name_implies_no_branches() -> None:
    assert not over(branches(False, [TURN_1, COMPACTED]))


def test_a_continued_conversation_abandons_only_an_unsent_answer() -> None:
    answered = [*TURN_1, 500_219, 500_220, *range(400, 410)]
    assert not over(branches(True, [TURN_1, answered]))
    rewritten = [*TURN_1, *range(600, 610)]
    assert over(branches(True, [TURN_1, rewritten])) == {500_219, 500_220}


def test_a_request_that_shares_nothing_with_its_conversation_ends_no_branch() -> None:
    side = list(range(900, 920))  # for example a title for the chat under the same session id
    assert not over(branches(True, [TURN_1, side]))


def test_a_branch_that_others_use_is_not_over() -> None:
    tree = LiveTree(512, "wa", {"quantum_tokens": 1, "block_tokens": 4})
    ask(tree, TURN_1, 0.0, conversation="c", linear=True)
    ask(tree, TURN_1, 1.0, conversation="another", linear=True)
    ask(tree, COMPACTED, 2.0, conversation="c", linear=True)
    assert not over(tree) & set(TURN_1)


def test_a_return_to_abandoned_branches_ends_trust() -> None:
    tree = branches(True, [], block_tokens=4)
    now = 0.0
    for round_ in range(40):
        base = [*SYSTEM, *range(1000 * round_ + 2000, 1000 * round_ + 2020)]
        for prompt in (base, [*SYSTEM, *range(1000 * round_ + 2500, 1000 * round_ + 2510)], base):
            now += 1.0
            ask(tree, [*prompt, int(now) + 900_000], now, conversation="c", linear=True)
    trust = tree.core.live.device_policy.model.hints
    assert not trust.over_trusted((None, "inferred"))
    assert trust.over_trusted(None)  # hints of clients are counted separately
    check(tree)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["a", "b", None]),
            st.sampled_from(["x", "y", "z"]),
            st.booleans(),
            st.lists(st.integers(0, 2), min_size=1, max_size=12),
        ),
        max_size=25,
    )
)
def test_any_claims_leave_the_tree_sound_and_touch_no_other_tenant(asked: list) -> None:
    tree = LiveTree(128, "wa", {"quantum_tokens": 1, "block_tokens": 2})
    for n, (salt, name, linear, prompt) in enumerate(asked):
        before = {
            id(node): (node.canopy.over, node.canopy.keep_until)
            for node in tree.core._node_arena.values()
            if node.canopy.tenant != salt
        }
        claims = {"conversation": name, "linear": linear}
        ask(tree, prompt, float(n), salt, **claims)
        for node in tree.core._node_arena.values():
            if id(node) in before and node.canopy.tenant != salt:
                assert before[id(node)] == (node.canopy.over, node.canopy.keep_until)
        tree.core.protected.keeps.check(node.canopy for node in tree.core._node_arena.values())
        check(tree)
