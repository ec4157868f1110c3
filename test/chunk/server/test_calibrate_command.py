"""``canopy documents calibrate`` measures, saves, and is read back by a server's start."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from canopy_chunks.calibrate import setting_of  # noqa: E402
from canopy_chunks.model import identity_of, load  # noqa: E402
from canopy_chunks.quality_gate import calibrated_ratios, measure_quality  # noqa: E402
from canopy_lab.cli.main import main  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """A small random model and a word tokenizer, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from support.chunk_models import build

    folder = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(folder)
    words = ["the", "old", "river", "was", "built", "near", "secret", "password", "of", "is"]
    vocab = {w: i for i, w in enumerate(["<unk>", "</s>", *words])}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return folder


def calibrate(model_dir, out, *more) -> int:
    small = ["--limit", "2", "--chunks", "3", "--chunk-tokens", "24"]
    return main(
        ["documents", "calibrate", "--model", str(model_dir), "--out", str(out), *small, *more]
    )


def setting(model_dir, dtype=torch.float32, tp_size: int = 1):
    """What a server of this model would look for."""
    return setting_of(load(model_dir, dtype), identity_of(model_dir), tp_size, "torch_native")


def test_what_was_measured_is_saved_by_tier_and_used(model_dir, tmp_path, capsys) -> None:
    out = tmp_path / "c.json"
    assert calibrate(model_dir, out, "--keep", "0.3") == 0
    saved = {entry["tier"]: entry for entry in json.loads(out.read_text()).values()}
    assert set(saved) == {"memory", "disk"}
    for entry in saved.values():
        assert 0 <= entry["r_min"] <= entry["ratio"] <= 1
        assert entry["profile"]["compute_s"] > 0
    assert "smallest ratio" in capsys.readouterr().out
    assert calibrated_ratios(str(out), setting(model_dir)) == {
        "device": saved["memory"]["ratio"],
        "host": saved["memory"]["ratio"],
        "disk": saved["disk"]["ratio"],
    }


def test_a_calibration_of_another_model_is_refused(model_dir, tmp_path) -> None:
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(CanopyError, match="canopy documents calibrate"):
        calibrated_ratios(str(tmp_path / "c.json"), setting(model_dir))


@pytest.mark.parametrize(
    ("tp_size", "dtype", "message"),
    [
        (1, torch.bfloat16, "float32 .* bfloat16"),
        (2, torch.float32, "--tp-size 2.*--url.*--canopy-chunk-ratio"),
    ],
)
def test_a_calibration_for_another_dtype_or_split_is_refused_by_name(
    model_dir, tmp_path, tp_size, dtype, message
) -> None:
    out = tmp_path / "c.json"
    assert calibrate(model_dir, out, "--tiers", "memory") == 0
    with pytest.raises(CanopyError, match=message):
        calibrated_ratios(str(out), setting(model_dir, dtype, tp_size))


def test_a_calibration_of_an_older_version_is_refused_by_name(model_dir, tmp_path) -> None:
    out = tmp_path / "c.json"
    assert calibrate(model_dir, out, "--tiers", "memory") == 0
    saved = json.loads(out.read_text())
    for entry in saved.values():
        del entry["dtype"], entry["tp_size"]
    out.write_text(json.dumps({f"old {key}": entry for key, entry in saved.items()}))
    with pytest.raises(CanopyError, match="older version"):
        calibrated_ratios(str(out), setting(model_dir))


def test_mistakes_are_told(model_dir, tmp_path, capsys) -> None:
    assert calibrate(model_dir, tmp_path / "c.json", "--tiers", "tape") == 2
    assert "--tiers" in capsys.readouterr().err
    assert calibrate(model_dir, tmp_path / "no" / "c.json") == 2
    assert "folder" in capsys.readouterr().err


def test_full_recompute_loses_nothing_and_no_recompute_something(model_dir) -> None:
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), load(model_dir)
    exact = measure_quality(model, tokenizer, "asked", 1.0, "prefix", 3)
    assert exact["kl"] == pytest.approx(0, abs=1e-5)
    assert exact["top1"] == 1.0
    none = measure_quality(model, tokenizer, "asked", 0.0, "alone", 3)
    assert none["kl"] > exact["kl"]
