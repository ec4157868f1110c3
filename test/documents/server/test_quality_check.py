"""A server with a minimum of kept answers starts only if every ratio that it may serve keeps them."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.calibration.saved import Calibration, Calibrations, Setting
from canopy_documents.calibration.search import CostProfile
from canopy_documents.quality import start_check
from canopy_documents.quality.start_check import KeptAnswers, check_quality
from canopy_documents.server import start
from canopy_documents.server.options import DEFAULT_RATIO, ReuseOptions
from sglang_canopy.errors import CanopyError

SELECTOR = "question"


@pytest.fixture
def kept_by_ratio(monkeypatch):
    """Results by ratio that ``measure_kept`` returns; a ratio without an entry keeps 10 of 10 answers."""
    results: dict[float, KeptAnswers] = {}

    def measure(model, tokenizer, selector, ratios):
        return {ratio: results.get(ratio, KeptAnswers(10, 10)) for ratio in ratios}

    monkeypatch.setattr(start_check, "measure_kept", measure)
    return results


def test_without_a_minimum_nothing_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(start_check, "measure_kept", lambda *_: pytest.fail("answers are measured"))
    assert check_quality(None, None, SELECTOR, [0.15], None) == {}


def test_one_ratio_below_the_minimum_refuses_the_start_and_is_named(kept_by_ratio) -> None:
    kept_by_ratio[0.06] = KeptAnswers(10, 7)
    assert check_quality(None, object(), SELECTOR, [0.1, 0.2], 0.8)[0.1].share == 1.0
    with pytest.raises(CanopyError, match=r"at ratio 0\.06: 7 of 10 right answers are kept"):
        check_quality(None, object(), SELECTOR, [0.2, 0.06], 0.8)


def test_a_model_that_answers_nothing_misses_every_minimum(kept_by_ratio) -> None:
    kept_by_ratio[0.15] = KeptAnswers(0, 0)
    with pytest.raises(CanopyError, match="no answer is right even without reuse"):
        check_quality(None, object(), SELECTOR, [0.15], 0.0)


def test_a_quality_check_needs_a_tokenizer() -> None:
    with pytest.raises(CanopyError, match="needs a tokenizer"):
        check_quality(None, None, SELECTOR, [0.15], 0.5)


def check_arguments(llama, monkeypatch, tmp_path, calibrated: dict[str, float], **options) -> dict:
    """Return the ratios and the selector that a starting server passes to ``check_quality``."""
    arguments: dict = {}
    device = f"cpu-{torch.get_num_threads()}"
    setting = Setting(llama.identity, device, "float32", 1, "torch_native")
    path = tmp_path / "c.json"
    for tier, ratio in calibrated.items():
        Calibrations(path).put(setting, tier, Calibration(ratio, 0.0, CostProfile(1.0, 1.0)))
    monkeypatch.setattr(
        start,
        "check_quality",
        lambda model, tokenizer, selector, ratios, min_share: arguments.update(
            selector=selector, ratios=ratios
        ),
    )
    reuse_options = ReuseOptions(**options, **({"calibration": str(path)} if calibrated else {}))
    canopy_attention = SimpleNamespace(name="torch_native")
    runner = SimpleNamespace(attn_backend=SimpleNamespace(canopy=canopy_attention))
    engine = SimpleNamespace(options=reuse_options, model=llama, runner=runner)
    start._calibrate_and_check(engine, None, 1)
    return arguments


DISK_OPTIONS = {"disk_mb": 8, "directory": "somewhere"}


@pytest.mark.parametrize(
    ("calibrated", "options", "expected_ratios"),
    [
        ({}, {}, {DEFAULT_RATIO}),
        ({}, {"ratio": 0.3}, {0.3}),
        ({"memory": 0.06, "disk": 0.093}, DISK_OPTIONS, {0.06, 0.093}),
        ({"disk": 0.093}, {**DISK_OPTIONS, "selector": "frequency"}, {DEFAULT_RATIO, 0.093}),
        ({"memory": 0.06, "disk": 0.093}, {**DISK_OPTIONS, "ratio": 0.0}, {0.0}),
    ],
)
def test_the_check_measures_the_served_selector_at_every_ratio_that_may_be_served(
    llama, monkeypatch, tmp_path, calibrated, options, expected_ratios
) -> None:
    arguments = check_arguments(llama, monkeypatch, tmp_path, calibrated, **options)
    assert arguments == {"ratios": expected_ratios, "selector": options.get("selector", SELECTOR)}


def test_answers_are_decoded_freely_and_all_are_kept_at_ratio_one(llama, monkeypatch) -> None:
    monkeypatch.setattr(start_check, "DOCUMENT_TOKENS", 24)
    monkeypatch.setattr(start_check, "contains_answer", lambda text, answers: bool(text))
    kept_by_ratio = start_check.measure_kept(llama, LetterSumTokenizer(), SELECTOR, [0.2, 1.0], 2)
    assert kept_by_ratio[1.0] == KeptAnswers(2, 2)
    monkeypatch.undo()
    example = next(iter(start_check.make_examples(["single"], 1, ["a b c d e f g h"])))
    case = start_check.make_case(LetterSumTokenizer(), example, 6, 24)
    chunks = start_check.encode_case(llama, case)
    exact = start_check.fused_answer(llama, LetterSumTokenizer(), case, chunks, SELECTOR, 1.0)
    assert exact == start_check.full_answer(llama, LetterSumTokenizer(), case)


class LetterSumTokenizer:
    """A tokenizer of one token per word: the sum of the word's character codes, modulo 300."""

    eos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict:
        return {"input_ids": [sum(map(ord, word)) % 300 for word in text.split()] or [1]}

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))
