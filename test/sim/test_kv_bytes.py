"""KV bytes of a token by architecture: published dimensions, and figures worked out by hand."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.sim.kv_bytes import kv_bytes_per_token
from canopy_lab.sim.model import load_model_shape
from sglang_canopy.errors import CanopyError

DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
    "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
}  # fmt: skip
GQA = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
       "num_key_value_heads": 8, "intermediate_size": 14336}  # fmt: skip
QWEN3_NEXT = {"num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
              "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4}  # fmt: skip
JAMBA = {**GQA, "attn_layer_period": 8, "attn_layer_offset": 4}
NEMOTRON_H = {**GQA, "num_hidden_layers": 8, "head_dim": 128, "hybrid_override_pattern": "M-M*M-M-"}
KIMI_LINEAR = {
    "num_hidden_layers": 27, "hidden_size": 2304, "num_attention_heads": 32, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "linear_attn_config": {"full_attn_layers": [4, 8, 12, 16, 20, 24, 27]},
}  # fmt: skip
MINIMAX = {
    **GQA,
    "num_hidden_layers": 8,
    "head_dim": 128,
    "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1],
}
GPT_OSS = {**GQA, "num_hidden_layers": 4, "head_dim": 64,
           "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
GEMMA_3N = {**GQA, "num_hidden_layers": 30, "head_dim": 256, "num_key_value_heads": 2, "num_kv_shared_layers": 10}  # fmt: skip
LISTED = {**NEMOTRON_H, "num_hidden_layers": None, "hybrid_override_pattern": None,
          "layers_block_type": ["mamba", "attention", "mlp", "linear_attention"]}  # fmt: skip
CHATGLM = {"num_layers": 28, "hidden_size": 4096, "num_attention_heads": 32, "multi_query_attention": True,
           "multi_query_group_num": 2, "kv_channels": 128, "ffn_hidden_size": 13696}  # fmt: skip
DBRX = {"n_layers": 40, "d_model": 6144, "n_heads": 48, "attn_config": {"kv_n_heads": 8}}
GPT_BIGCODE = {"n_layer": 40, "n_embd": 6144, "n_head": 48, "multi_query": True}
FALCON_40B = {"num_hidden_layers": 60, "hidden_size": 8192, "num_attention_heads": 128, "num_kv_heads": 8,
              "multi_query": True, "new_decoder_architecture": True}  # fmt: skip
GPT2 = {"n_layer": 12, "n_embd": 768, "n_head": 12}
MIMO_V2 = {
    **GQA,
    "num_hidden_layers": 10,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
}
INTERN_VL = {"llm_config": GQA, "vision_config": {"num_hidden_layers": 45, "hidden_size": 3200}}
FP8_CACHE = {**GQA, "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}

FAMILIES: list[tuple[str, dict[str, Any], int]] = [
    ("grouped queries", GQA, 2 * 32 * 8 * 128 * 2),
    ("latent attention", DEEPSEEK_V3, 61 * (512 + 64) * 2),
    ("sparse latent attention", {**DEEPSEEK_V3, "index_head_dim": 128, "index_topk": 2048}, 61 * (576 * 2 + 132)),
    ("latent attention without positions", {**DEEPSEEK_V3, "use_mla_nope": True}, 61 * 512 * 2),
    ("DeepSeek-VL2 small: no latent attention", {**DEEPSEEK_V3, "use_mla": False}, 61 * 128 * (56 + 128) * 2),
    ("linear attention in three of four layers", QWEN3_NEXT, 2 * 12 * 2 * 256 * 2),
    ("Mamba in seven of eight layers", JAMBA, 2 * 4 * 8 * 128 * 2),
    ("a pattern of layers", NEMOTRON_H, 2 * 1 * 8 * 128 * 2),
    ("linear and latent attention", KIMI_LINEAR, 7 * 576 * 2),
    ("a list of attention types", MINIMAX, 2 * 1 * 8 * 128 * 2),
    ("sliding windows", GPT_OSS, 2 * 4 * 8 * 64 * 2),
    ("layers that share KV, for which SGLang allocates too", GEMMA_3N, 2 * 30 * 2 * 256 * 2),
    ("indexed attention", {**DEEPSEEK_V3, "layer_types": ["indexed_attention"] * 61}, 61 * 576 * 2),
    ("two attentions in a layer", {**DEEPSEEK_V3, "model_type": "longcat_flash"}, 2 * 61 * 576 * 2),
    ("layers that run twice", {**GQA, "num_loops": 2}, 2 * 2 * 32 * 8 * 128 * 2),
    ("attention in every other layer", {**GQA, "model_type": "zaya"}, 2 * 16 * 8 * 128 * 2),
    ("a list of layers in place of their number", LISTED, 2 * 1 * 8 * 128 * 2),
    ("groups of heads", {**GQA, "num_key_value_heads": None, "num_attention_groups": 1}, 2 * 32 * 1 * 128 * 2),
    ("a layer with wider heads", {**GQA, "head_dim": 128, "per_layer_config": {"05": {"head_dim": 256}}}, 2 * 33 * 8 * 128 * 2),
    ("settings of a layer that is not there", {**GQA, "per_layer_config": {"99": {"head_dim": 256}}, "layer_types": ["full_attention"] * 32}, 2 * 32 * 8 * 128 * 2),
    ("ChatGLM's names", CHATGLM, 2 * 28 * 2 * 128 * 2),
    ("DBRX's names", DBRX, 2 * 40 * 8 * 128 * 2),
    ("one KV head", GPT_BIGCODE, 2 * 40 * 1 * 128 * 2),
    ("Falcon's groups", FALCON_40B, 2 * 60 * 8 * 64 * 2),
    ("GPT-2's names", GPT2, 2 * 12 * 12 * 64 * 2),
    ("values narrower than keys", MIMO_V2, 10 * 4 * (192 + 128) * 2),
    ("a vision model", INTERN_VL, 2 * 32 * 8 * 128 * 2),
    ("an 8-bit cache", FP8_CACHE, 2 * 32 * 8 * 128),
]  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), [f[1:] for f in FAMILIES], ids=[f[0] for f in FAMILIES])  # fmt: skip
def test_bytes_of_a_family(config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert kv_bytes_per_token(config) == expected
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_shape(str(tmp_path)).kv_bytes_per_token() == expected


def test_the_width_of_a_value_can_be_given() -> None:
    assert kv_bytes_per_token(GQA, 1) == kv_bytes_per_token(GQA) // 2


def test_an_unknown_layout_needs_the_given_figure() -> None:
    with pytest.raises(CanopyError, match="--kv-bytes-per-token"):
        kv_bytes_per_token({**GQA, "compress_ratios": [4, 128]})
    with pytest.raises(CanopyError, match="none of num_hidden_layers"):
        kv_bytes_per_token({"hidden_size": 8})


def test_latent_models_are_laid_out_as_sglang_does() -> None:
    """Every architecture that SGLang gives latent attention names the rank that we look for."""
    sglang = pytest.importorskip("sglang")
    source = (Path(sglang.__file__).parent / "srt/configs/model_config.py").read_text()
    latent = "self.attention_arch = AttentionArch.MLA"
    ranked = re.findall(rf"{latent}\n\s+self\.kv_lora_rank = \S+\.kv_lora_rank\n", source)
    assert len(ranked) == source.count(latent) > 5
