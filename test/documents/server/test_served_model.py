"""SGLang's own layers, run for rows of the engine's, against a plain model of the same weights."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from canopy_documents.server import model_view
from sglang_canopy.errors import CanopyError
from support.document_models import FAMILIES, build_model
from support.worker import run_in_scheduler_process

FLAGS = ("--canopy-documents", "memory_mb=16,prompt_tokens=512")


def compare_rows(function: str, folder: Path) -> dict[str, Any]:
    return run_in_scheduler_process(f"served_rows:{function}", folder, *FLAGS, timeout_s=400)


@pytest.mark.long
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_sglangs_layers_equal_a_plain_model(family, tmp_path) -> None:
    model = build_model(family)
    for name, weights in model.named_parameters():
        if ".mlp." in name and name.endswith("bias"):  # SGLang's Llama has none there
            torch.nn.init.zeros_(weights)
    model.save_pretrained(tmp_path)
    comparison = compare_rows("with_plain_model", tmp_path)
    assert comparison["layers"] == [0, 1, 2], "the forward ends after the last probed layer"
    assert max(comparison["differences"].values()) < 1e-4, comparison["differences"]


@pytest.mark.long
def test_a_model_with_unread_weights_runs(tmp_path) -> None:
    """Phi-3 has one matrix for queries, keys and values; only SGLang's layers split it."""
    torch.manual_seed(7)
    config = transformers.Phi3Config(
        vocab_size=300, hidden_size=128, intermediate_size=192, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        initializer_range=0.15, pad_token_id=0,
    )  # fmt: skip
    transformers.Phi3ForCausalLM(config).save_pretrained(tmp_path)
    comparison = compare_rows("with_transformers", tmp_path)
    assert comparison["largest"] > 1
    assert max(comparison["differences"].values()) < 1e-4, comparison


def test_an_untested_model_quantisation_or_head_norm_is_refused_by_name() -> None:
    class GemmaForCausalLM:
        pass

    config = SimpleNamespace(hf_config=SimpleNamespace())
    runner = SimpleNamespace(model=GemmaForCausalLM(), model_config=config)
    with pytest.raises(CanopyError, match="not GemmaForCausalLM"):
        model_view.served_model(runner)
    llama_model = type("LlamaForCausalLM", (), {})()
    awq_config = SimpleNamespace(quantization="awq", hf_config=SimpleNamespace())
    with pytest.raises(CanopyError, match=r"quantised \(awq\)"):  # the method in the checkpoint
        model_view.served_model(SimpleNamespace(model=llama_model, model_config=awq_config))
    shape = SimpleNamespace(head_dim=8)
    norms = [SimpleNamespace(weight=torch.ones(width)) for width in (8, 16)]
    model_view.check_head_norms(SimpleNamespace(q_norm=norms[0], k_norm=norms[0]), shape)
    with pytest.raises(CanopyError, match="over more than a head"):
        model_view.check_head_norms(SimpleNamespace(q_norm=norms[0], k_norm=norms[1]), shape)
