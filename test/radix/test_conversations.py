"""Named conversations: their nodes, their ends, and bounds of memory."""

from hypothesis import given
from hypothesis import strategies as st

from support.live_tree import LiveTree, check_tree, fake_req
from support.tree_recount import recount_keeps


def serve(tree: LiveTree, prompt: list[int], time: float, salt: str | None = None, **stamp: object):
    """Serve a request as SGLang's hooks report it, with an answer of two tokens."""
    answer = [prompt[-1] + 500_000, prompt[-1] + 500_001]
    req = fake_req(prompt, answer, {"time": time, **stamp}, cache_salt=salt)
    request = tree.core.requests.register(req)
    tree.core.requests.report_end(req)
    tree.insert([*prompt, *answer], request, salt)


def test_one_prompt_under_ever_new_names_keeps_a_bounded_number_of_them() -> None:
    tree = LiveTree(256, "wa")
    for number in range(2000):
        serve(tree, [1, 2, 3, 4], float(number), conversation=f"made-up-{number}")
    assert len(tree.core.conversations) <= 2 * len(tree.core._node_arena) + 64
    check_tree(tree)


def ended_tokens(tree: LiveTree) -> set[int]:
    """Return the tokens of nodes whose conversation is over."""
    nodes = tree.core._node_arena.values()
    return {token for node in nodes if node.canopy.over for token in node.key.raw_token_ids()}


FIRST_TURN = list(range(200, 220))


def test_a_request_that_ends_its_session_ends_the_conversations_kv() -> None:
    tree = LiveTree(512, "wa", {"quantum_tokens": 1, "block_tokens": 4})
    serve(tree, FIRST_TURN, 0.0, conversation="c", linear=True)
    assert not ended_tokens(tree)
    serve(tree, [7, 7, 7], 5.0, conversation="c", linear=True, over=True)
    assert set(FIRST_TURN) <= ended_tokens(tree)


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
def test_any_hints_leave_the_tree_consistent_and_other_tenants_unchanged(requests: list) -> None:
    tree = LiveTree(128, "wa", {"quantum_tokens": 1, "block_tokens": 2})
    for number, (salt, name, over, prompt) in enumerate(requests):
        others_before = {
            id(node): (node.canopy.over, node.canopy.keep_until)
            for node in tree.core._node_arena.values()
            if node.canopy.tenant != salt
        }
        serve(tree, prompt, float(number), salt, conversation=name, linear=True, over=over)
        for node in tree.core._node_arena.values():
            if id(node) in others_before and node.canopy.tenant != salt:
                assert others_before[id(node)] == (node.canopy.over, node.canopy.keep_until)
        nodes = tree.core._node_arena.values()
        recount_keeps(tree.core.protected.keeps, (node.canopy for node in nodes))
        check_tree(tree)
