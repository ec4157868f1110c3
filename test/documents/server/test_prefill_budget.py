"""The prefill budget is charged with the computed rows."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canopy_documents.server import admission
from sglang_canopy.server.scheduler.admission import refuse_second_chunk
from support.bare_adder import bare_adder


class StockAdder:
    """The part of SGLang's adder that the budget uses: one window of ``rem_chunk_tokens``."""

    def __init__(self, window_tokens: int) -> None:
        self.rem_input_tokens = self.rem_chunk_tokens = window_tokens
        self.can_run_list: list = []

    def add_one_req(self, req, full=False):
        length = len(req.full_untruncated_fill_ids) - req.prefix_len
        taken_tokens = min(length, self.rem_chunk_tokens)
        if full or taken_tokens <= 0:
            return "no"
        req.extend_end = req.prefix_len + taken_tokens
        self.can_run_list.append(req)
        self.rem_chunk_tokens -= taken_tokens
        self.rem_input_tokens -= taken_tokens
        return "yes"


def request(prompt_tokens: int, prefix_tokens: int = 0):
    return SimpleNamespace(
        full_untruncated_fill_ids=[0] * prompt_tokens,
        prefix_len=prefix_tokens,
        host_hit_length=0,
        extend_end=prefix_tokens,
    )


@pytest.fixture
def make_adder(monkeypatch):
    """``make_adder(window_tokens, *spans)``: an adder whose prompts reuse these spans, at ratio 0.2."""

    def new_adder(window_tokens: int | None, *spans: tuple[int, int]):
        reuse = admission.ExpectedReuse(spans, 0.2)
        monkeypatch.setattr(admission, "expected_reuse", lambda engine, req: reuse)
        adder_class = admission._make_adder_class(StockAdder, object())
        return adder_class(window_tokens)

    return new_adder


def test_a_fused_prompt_fills_only_its_share_of_a_window(make_adder) -> None:
    adder = make_adder(100, (10, 110))
    assert adder.add_one_req(request(120)) == "yes"
    assert adder.can_run_list[0].extend_end == 120
    assert adder.rem_chunk_tokens == adder.rem_input_tokens == 60
    assert adder.add_one_req(request(190, 140)) == "yes"  # behind the span: nothing saved
    assert adder.rem_chunk_tokens == 10


def test_a_rejected_prompt_leaves_the_budget_as_it_was(make_adder) -> None:
    adder = make_adder(100, (10, 110))
    assert adder.add_one_req(request(120), True) == "no"
    assert adder.rem_chunk_tokens == adder.rem_input_tokens == 100


def test_a_long_prompt_is_cut_after_a_window_of_computed_tokens(make_adder) -> None:
    adder = make_adder(100, (300, 600))
    assert adder.add_one_req(request(700)) == "yes"
    assert adder.can_run_list[0].extend_end == 100  # the known documents are behind the window
    adder = make_adder(100, (50, 550))
    assert adder.add_one_req(request(700)) == "yes"
    end = adder.can_run_list[0].extend_end
    assert 290 <= end <= 304  # 50 tokens, and a fifth of 250
    assert adder.rem_chunk_tokens >= 0


def test_tokens_cut_by_another_limit_return_their_savings(make_adder) -> None:
    adder = make_adder(100, (0, 400))
    stock_add = StockAdder.add_one_req

    def add_50_tokens(self, req, *_):  # the pool has room for 50 tokens
        cut_req = request(50, 0)
        stock_add(self, cut_req)
        req.extend_end = 50
        return "yes"

    class ShortStockAdder(StockAdder):
        add_one_req = add_50_tokens

    adder_class = admission._make_adder_class(ShortStockAdder, object())
    adder = adder_class(100)
    adder.add_one_req(request(400))
    assert adder.rem_chunk_tokens == 100 - 50 + 40


def test_without_chunked_prefill_all_savings_count() -> None:
    assert admission.ExpectedReuse(((0, 100),), 0.15).window_credit(0, 120, None) == 85
    assert admission.ExpectedReuse(((0, 100),), 0.15).window_credit(40, 120, None) == 51


class AdderRequest(SimpleNamespace):
    """The fields of SGLang's request that its adder reads."""

    def __init__(self, index: int, prompt_tokens: int) -> None:
        super().__init__(
            index=index, full_untruncated_fill_ids=[0] * prompt_tokens, prefix_len=0, extend_end=0,
            output_ids=[], last_node=None, host_hit_length=0, swa_host_hit_length=0, auxiliary_swa_host_hit_length=0,
            retracted_stain=False, lock=None,
            sampling_params=SimpleNamespace(max_new_tokens=4, ignore_eos=False),
        )  # fmt: skip

    @property
    def extend_len(self) -> int:
        return self.extend_end - self.prefix_len

    def needs_host_load_back(self) -> bool:
        return False


def hooked_adder_class(window_tokens: int, page_tokens: int):
    """Return SGLang's adder class as a server hooks it, over an empty pool, and its result enum."""
    stock_class, policy = bare_adder(page_tokens)

    class HookedAdder(stock_class):
        def __init__(self) -> None:
            super().__init__(1 << 20, window_tokens)
            self.tree_cache.lock = lambda node: None

        def _select_prefill_admission(self, req, **options):
            original = policy.PrefillAdder._select_prefill_admission
            return refuse_second_chunk(original, self, req, **options)

    return HookedAdder, policy.AddReqResult


@settings(max_examples=300, deadline=None)
@given(
    window_tokens=st.integers(16, 300),
    page_tokens=st.sampled_from([1, 16, 64]),
    prompts=st.lists(
        st.tuples(st.integers(1, 600), st.integers(0, 300), st.integers(0, 300)),
        min_size=2, max_size=8,
    ),
    ratio=st.sampled_from([0.0, 0.05, 0.15, 1.0]),
    is_resumed=st.booleans(),
)  # fmt: skip
def test_one_prompt_of_a_batch_is_shortened_consistently_with_sglang(
    window_tokens, page_tokens, prompts, ratio, is_resumed
) -> None:
    stock_class, add_result = hooked_adder_class(window_tokens, page_tokens)
    adder_class = admission._make_adder_class(stock_class, object())
    spans = [((min(start, length), min(start + size, length)),) for length, start, size in prompts]

    def expected_reuse(engine, req):
        return admission.ExpectedReuse(spans[req.index], ratio)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "expected_reuse", expected_reuse)
        schedule = SimpleNamespace(schedule_policy="fcfs")
        patch.setattr("sglang.srt.managers.schedule_policy.get_schedule", lambda: schedule)
        adder = adder_class()
        for index, (length, _, _) in enumerate(prompts):
            if adder.budget_state() is add_result.OTHER:
                break
            req = AdderRequest(index, length)
            verdict = adder.add_one_req(req, has_chunked_req=is_resumed, truncation_align_size=None)
            if verdict is not add_result.CONTINUE:
                break
    cut_reqs = [r for r in adder.can_run_list if r.extend_end < len(r.full_untruncated_fill_ids)]
    assert cut_reqs == [r for r in [adder.new_chunked_req] if r and not is_resumed]
