"""The programs of CacheTune's figures (benchmark/papers/cachetune), on a small model."""

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")

from canopy_documents.fuse import rows as engine
from canopy_documents.fuse.cache import dense_cache


@pytest.fixture(autouse=True)
def papers_path(monkeypatch):
    folder = str(Path(__file__).parents[2] / "benchmark" / "papers")
    monkeypatch.setattr(sys, "path", [folder, *sys.path])


def test_prompts_side_by_side_get_the_logits_of_each_alone(llama, ids):
    from cachetune.decode import side_by_side

    prompts, last_tokens = [ids[:50], ids[60:110], ids[120:170]], ids[200:203]
    caches = []
    for prompt in prompts:
        caches.append(dense_cache(llama, 51))
        engine.prefill(llama, prompt, caches[-1])
    logits_together = side_by_side(llama, caches, torch.tensor([50]), last_tokens[:, None])
    for prompt, token, logits in zip(prompts, last_tokens, logits_together):
        cache = dense_cache(llama, 51)
        hidden = engine.prefill(llama, torch.cat([prompt, token[None]]), cache)
        assert torch.allclose(logits[0], llama.logits(hidden[-1:])[0], atol=1e-4)


def test_the_prefix_of_an_encoding_after_bos_is_the_prompts_first_token():
    import cachetune  # noqa: F401 (it puts the comparators on the path)
    from comparators.quality import prefix_for

    from canopy_documents.quality.answers import Case

    case = Case([7, 8, 9], [[1]], [2], ("x",), "t", [5])
    assert [prefix_for(case, mode) for mode in ("bos", "alone", "prefix")] == [(7,), (), (7, 8, 9)]


def test_the_summary_of_an_arm_has_its_mean_error_and_speedup():
    from cachetune.quality import mean_by_arm

    full_row = {"cpu_s": 4.0, "run": 1.0, "kl": 0.0, "top1": 1.0}
    arm_row = {"cpu_s": 1.0, "run": 0.2, "top1": 1.0}
    summary = mean_by_arm([{"full": full_row, "a": {**arm_row, "kl": kl}} for kl in (0.1, 0.3)])
    assert summary["a"]["kl_by_question"] == [0.1, 0.3]
    assert (summary["a"]["kl"], summary["a"]["kl_se"]) == (0.2, 0.1)
    assert summary["a"]["speedup"] == 4.0


def test_the_documents_of_a_question_contain_an_answer(data_dir):
    from cachetune.questions import read_questions

    for example in read_questions(data_dir, "musique", 5):
        text = " ".join(example.documents).lower()
        assert any(answer.lower() in text for answer in example.answers)
        assert len(example.documents) == 6
