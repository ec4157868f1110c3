"""Shapes of models: bytes of a token's KV, from presets and configurations."""

import json

import pytest

from canopy_lab.sim.model import load_model_shape
from sglang_canopy.errors import CanopyError


def test_the_preset_equals_the_config(tmp_path):
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_shape(str(tmp_path)) == load_model_shape("Llama-3.1-8B")


def test_a_missing_field_is_named(tmp_path):
    config_file = tmp_path / "config.json"
    config_file.write_text('{"hidden_size": 8}')
    with pytest.raises(CanopyError, match="num_hidden_layers"):
        load_model_shape(str(config_file))


GROUPED_QUERY = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
       "num_key_value_heads": 8, "intermediate_size": 14336}  # fmt: skip
EIGHT_BITS = {"kv_cache_scheme": {"num_bits": 8}}
LATENT = {**GROUPED_QUERY, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (GROUPED_QUERY, 2 * 32 * 8 * 128 * 2),
        ({**GROUPED_QUERY, "head_dim": 64}, 2 * 32 * 8 * 64 * 2),
        ({**GROUPED_QUERY, "num_key_value_heads": None}, 2 * 32 * 32 * 128 * 2),
        (
            {**GROUPED_QUERY, "layer_types": ["sliding_attention", "full_attention"] * 16},
            2 * 32 * 8 * 128 * 2,
        ),
        (LATENT, 61 * (512 + 64) * 2),
        ({"text_config": GROUPED_QUERY, "vision_config": {"hidden_size": 8}}, 2 * 32 * 8 * 128 * 2),
        ({**GROUPED_QUERY, "quantization_config": EIGHT_BITS}, 2 * 32 * 8 * 128),
        ({**GROUPED_QUERY, "full_attention_interval": 4, "kv_bytes_per_token": 12_345}, 12_345),
    ],
)
def test_bytes_of_a_tokens_kv(config, expected, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_model_shape(str(tmp_path)).kv_bytes_per_token() == expected


@pytest.mark.parametrize(
    "changed_fields",
    [{"full_attention_interval": 4}, {"layer_types": ["mamba"] * 32}, {"compress_ratios": [4]},
     {"hybrid_override_pattern": "M*"}],
)  # fmt: skip
def test_layers_that_differ_need_the_servers_figure(changed_fields, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**GROUPED_QUERY, **changed_fields}))
    with pytest.raises(CanopyError, match=r"store different KV .*'kv_bytes_per_token'"):
        load_model_shape(str(tmp_path))
