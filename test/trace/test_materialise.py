"""Tokens made from a trace's block ids: equal for equal ids, and of the trace's lengths."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_lab.trace import TraceRequest
from canopy_lab.trace.materialise import Materialiser, middle_token_ids, usable_token_ids
from sglang_canopy.errors import CanopyError

VOCAB = middle_token_ids(50_000)


def request(tokens: int, blocks: tuple[int, ...], block_tokens: int = 8, **options: Any):
    fields = {"time_s": 0.0, "output_tokens": 4, "conversation": "c", **options}
    return TraceRequest(input_tokens=tokens, blocks=blocks, block_tokens=block_tokens, **fields)


def common_length(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def test_equal_ids_give_equal_tokens_in_any_trace() -> None:
    source = Materialiser([request(20, (1, 2, 3)), request(16, (5, 2), conversation="d")], VOCAB)
    other_source = Materialiser([request(24, (1, 2, 9))], VOCAB)
    first, second = map(source.prompt, source.planned)
    (other_prompt,) = map(other_source.prompt, other_source.planned)
    assert first[:16] == other_prompt[:16]
    assert first[8:16] == second[8:16]
    assert first[:8] != second[:8]


def test_another_seed_makes_other_tokens() -> None:
    sources = [Materialiser([request(64, tuple(range(8)))], VOCAB, seed=seed) for seed in (0, 1)]
    prompt, other_prompt = (source.prompt(source.planned[0]) for source in sources)
    assert sum(token == other for token, other in zip(prompt, other_prompt)) < 4


def test_a_turn_begins_with_the_previous_turns_output() -> None:
    first = request(20, (1, 2, 30), output_tokens=9)
    second = request(45, (1, 2, 3, 4, 5, 60), turn=2)
    source = Materialiser([first, second], VOCAB)
    prompt_and_output = source.prompt(source.planned[0]) + source.output(source.planned[0])
    assert len(prompt_and_output) == 29
    assert source.prompt(source.planned[1])[:29] == prompt_and_output
    assert (source.planned[1].continues, source.planned[1].previous) == (0, 0)


def test_tails_without_an_id_are_continued_too() -> None:
    # Agentic traces give ids to full blocks only.
    turns = [request(19, (1, 2)), request(22, (1, 2), turn=2), request(40, (1, 2, 3, 4, 5), turn=3)]
    source = Materialiser(turns, VOCAB)
    prompts = [source.prompt(planned) for planned in source.planned]
    assert prompts[2][:22] == prompts[1]
    assert prompts[1][:19] == prompts[0]
    assert source.output(source.planned[1]) == prompts[2][22:26]


def test_tails_without_an_id_are_not_shared_between_conversations() -> None:
    source = Materialiser([request(12, (1,)), request(12, (1,), conversation="d")], VOCAB)
    prompt, other_prompt = (source.prompt(planned) for planned in source.planned)
    assert common_length(prompt, other_prompt) == 8


def test_a_branch_that_drops_history_is_no_continuation() -> None:
    source = Materialiser([request(20, (1, 2, 3)), request(40, (1, 7, 8, 9, 10), turn=2)], VOCAB)
    assert source.planned[1].continues is None
    assert source.planned[1].previous == 0


def test_scaling_keeps_sharing_and_at_least_one_token() -> None:
    scaled = Materialiser([request(1030, (1, 2, 3), 512, output_tokens=0)], VOCAB, Fraction(1, 16))
    (planned,) = scaled.planned
    assert (scaled.block_tokens(512), planned.prompt_tokens, planned.output_tokens) == (32, 65, 1)
    least = Materialiser([request(3, (1,), 8)], VOCAB, Fraction(1, 1000))
    assert (least.block_tokens(8), least.planned[0].prompt_tokens) == (1, 1)


def test_impossible_options_are_refused() -> None:
    for scale in (0, 2, -1):
        with pytest.raises(CanopyError, match="above 0 and at most 1"):
            Materialiser([], VOCAB, scale)
    with pytest.raises(CanopyError, match="16 or more tokens"):
        middle_token_ids(3)


def test_special_and_broken_tokens_are_never_used(smollm2: object) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(smollm2))
    token_ids = usable_token_ids(tokenizer)
    assert not set(token_ids.tolist()) & set(tokenizer.all_special_ids)
    assert len(token_ids) > 30_000
    for text in tokenizer.batch_decode([[token_id] for token_id in token_ids[::500].tolist()]):
        assert text.isascii()
        assert text.strip()


paths = st.lists(st.integers(0, 6), min_size=1, max_size=8)


@st.composite
def traces(draw: st.DrawFn) -> list[TraceRequest]:
    """Return prompts over a small tree: a block's id is its path, as a chained hash has it."""
    block_tokens = draw(st.sampled_from([1, 4, 16, 512]))
    ids: dict[tuple[int, ...], int] = {}
    requests = []
    for ordinal in range(draw(st.integers(1, 12))):
        path = draw(paths)
        blocks = tuple(ids.setdefault((*path[: i + 1], -1), len(ids)) for i in range(len(path)))
        last_tokens = draw(st.integers(1, block_tokens))
        tokens = (len(path) - 1) * block_tokens + last_tokens
        if last_tokens < block_tokens:  # a partial block's id is its own
            partial_block = ids.setdefault((*path, last_tokens), len(ids))
            blocks = (*blocks[:-1], partial_block)
        requests.append(
            request(
                tokens, blocks, block_tokens, time_s=float(ordinal), output_tokens=draw(st.integers(0, 40)),
                conversation=str(path[0]),
            )
        )  # fmt: skip
    return requests


@settings(max_examples=2 * settings.default.max_examples)
@given(traces(), st.sampled_from([1, Fraction(1, 2), Fraction(1, 16), Fraction(1, 100)]))
def test_lengths_are_exact_and_prefixes_shared_as_blocks_are(trace, scale):
    source = Materialiser(trace, VOCAB, scale)
    prompts = [source.prompt(p) for p in source.planned]
    vocabulary = set(VOCAB.tolist())
    for planned, prompt in zip(source.planned, prompts):
        assert len(prompt) == planned.prompt_tokens
        assert len(source.output(planned)) == planned.output_tokens >= 1
        assert set(prompt) <= vocabulary
        if scale == 1:
            assert len(prompt) == planned.request.input_tokens
        block_tokens = source.block_tokens(planned.request.block_tokens)
        assert -(-len(prompt) // block_tokens) <= len(planned.request.blocks)
    for a in source.planned:
        for b in source.planned:
            block_tokens = source.block_tokens(a.request.block_tokens)
            shared_blocks = common_length(list(a.request.blocks), list(b.request.blocks))
            shared_tokens = min(shared_blocks * block_tokens, a.prompt_tokens, b.prompt_tokens)
            assert prompts[a.ordinal][:shared_tokens] == prompts[b.ordinal][:shared_tokens]
    for planned in source.planned:
        if planned.continues is not None:
            previous = source.planned[planned.continues]
            is_met = prompts[planned.ordinal][: previous.prompt_tokens] == prompts[previous.ordinal]
            # Two requests may end in one partial block and continue differently: one can be met.
            equal_paths = [p for p in source.planned if p.request.blocks == previous.request.blocks]
            assert is_met or len(equal_paths) > 1


@settings(max_examples=100)
@given(st.integers(0, 2**63), st.integers(1, 600), st.integers(1, 600))
def test_a_shorter_cut_of_a_block_is_a_prefix_of_a_longer_one(block, tokens, other_tokens):
    lengths = sorted((tokens, other_tokens))
    sources = [Materialiser([request(tokens, (block,), 600)], VOCAB) for tokens in lengths]
    short_prompt, long_prompt = (source.prompt(source.planned[0]) for source in sources)
    assert long_prompt[: len(short_prompt)] == short_prompt
