"""The programs of CacheTune's figures (benchmark/papers/cachetune), on a small model."""

import sys
from pathlib import Path

import numpy
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from canopy_chunks.fuse import rows as engine  # noqa: E402
from canopy_chunks.fuse.cache import dense_cache  # noqa: E402
from canopy_chunks.fuse.encode import encode  # noqa: E402
from canopy_chunks.fuse.fusion import fused_prefill  # noqa: E402
from canopy_chunks.fuse.selectors import make_selector  # noqa: E402
from canopy_chunks.store.chunk import FusedPrompt, Placed  # noqa: E402


@pytest.fixture(autouse=True)
def papers(monkeypatch):
    folder = str(Path(__file__).parents[2] / "benchmark" / "papers")
    monkeypatch.setattr(sys, "path", [folder, *sys.path])


def test_prompts_side_by_side_get_the_logits_of_each_alone(llama, ids):
    from cachetune.decode import side_by_side

    prompts, last = [ids[:50], ids[60:110], ids[120:170]], ids[200:203]
    caches = []
    for one in prompts:
        caches.append(dense_cache(llama, 51))
        engine.prefill(llama, one, caches[-1])
    together = side_by_side(llama, caches, torch.tensor([50]), last[:, None])
    for one, token, logits in zip(prompts, last, together):
        cache = dense_cache(llama, 51)
        alone = engine.prefill(llama, torch.cat([one, token[None]]), cache)
        assert torch.allclose(logits[0], llama.logits(alone[-1:])[0], atol=1e-4)


def test_behind_bos_is_behind_the_prompts_first_token():
    import cachetune  # noqa: F401 (it puts the comparators on the path)
    from comparators.quality import behind

    from canopy_chunks.quality.answers import Case

    case = Case([7, 8, 9], [[1]], [2], ("x",), "t", [5])
    assert [behind(case, how) for how in ("bos", "alone", "prefix")] == [(7,), (), (7, 8, 9)]


def test_arms_are_compared_on_the_same_questions():
    from cachetune.summary import by_arm

    full = {"cpu_s": 4.0, "run": 1.0, "kl": 0.0, "top1": 1.0}
    found = by_arm(
        [{"full": full, "a": {"cpu_s": 1.0, "run": 0.2, "kl": k, "top1": 1.0}} for k in (0.1, 0.3)]
    )
    assert found["a"]["kl_by_question"] == [0.1, 0.3]
    assert (found["a"]["kl"], found["a"]["kl_se"]) == (0.2, 0.1)
    assert found["a"]["speedup"] == 4.0


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_reading_a_layer_ahead_changes_no_logit(llama, ids, tmp_path, monkeypatch, where):
    from cachetune import pools

    monkeypatch.setattr(pools, "loaded", lambda: (llama, None))
    placed = [Placed(encode(llama, ids[a : a + 60].tolist()), a) for a in (0, 60)]
    prompt = FusedPrompt(ids[:130], tuple(placed))
    pool = pools.Pool(where, tmp_path if where == "disk" else None)
    for ratio in (0.0, 0.15, 1.0):
        expected = fused_prefill(
            llama, prompt, dense_cache(llama, 130), make_selector("frequency"), ratio
        )
        _, logits = pools.overlapped(prompt, pool, ratio, dense_cache(llama, 130))
        assert torch.allclose(logits, expected.logits, atol=1e-4), ratio


def test_a_pipeline_by_hand():
    from cachetune.pools import in_pipeline

    assert in_pipeline([1, 1, 1], [2, 2, 2]) == 7  # bound by computing: the first read, then 3 x 2
    assert in_pipeline([2, 2, 2], [1, 1, 1]) == 7  # bound by reading: 3 x 2, then the last layer
    assert in_pipeline([0, 5, 0], [1, 1, 1]) == 7


def test_the_queue_waits_by_the_pollaczek_khinchine_formula():
    from cachetune.load import queue

    times, rate = numpy.array([0.5, 1.0, 3.0]), 0.4
    mean, square = times.mean(), (times**2).mean()
    expected = rate * square / (2 * (1 - rate * mean)) + mean
    assert queue(times, rate, 400_000).mean() == pytest.approx(expected, rel=0.05)


def test_algorithm_1_as_printed_is_golden_section_search_from_a_golden_point_alone():
    """With the prior it can leave the valley: reuse of a probe needs golden points."""
    from cachetune.search import as_printed

    from canopy_chunks.calibration.search import GOLDEN, golden_section

    def valley(r):
        return abs(r - 0.33)

    cold, _ = as_printed(valley, 1 - GOLDEN * 0.85, 0.15, 1.0, 0.01)
    warm, _ = as_printed(valley, 0.2, 0.15, 1.0, 0.01)
    assert cold == pytest.approx(0.33, abs=0.01)
    assert warm == pytest.approx(0.2, abs=0.05)  # stuck at its prior
    assert golden_section(valley, 0.2, 0.15, 1.0, 0.01).ratio == pytest.approx(0.33, abs=0.01)


def test_questions_hold_their_answers(data_dir):
    from cachetune.questions import questions

    for example in questions(data_dir, "musique", 5):
        text = " ".join(example.documents).lower()
        assert any(answer.lower() in text for answer in example.answers)
        assert len(example.documents) == 6
