"""KV bytes of every model family whose config SGLang can build here, against SGLang's own layout."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from canopy_lab.sim.kv_bytes import kv_bytes_per_token
from sglang_canopy.errors import CanopyError

pytestmark = pytest.mark.long

sglang = pytest.importorskip("sglang")
SRT = Path(sglang.__file__).parent / "srt"
ENDS = r"(?:ForCausalLM|ForConditionalGeneration|LMHeadModel|ChatModel)"
ASKS = {"whisper", "mamba", "mamba2", "falcon_mamba"}
"""An encoder, or no attention: the command asks for --kv-bytes-per-token."""
UNLIKE = {
    "deepseek-ocr": "default config has latent attention, which no checkpoint has",
    "unlimited-ocr": "default config has latent attention, which no checkpoint has",
    "gigachat3_5": "default config names no layer with attention",
    "lfm2_moe": "default config names no layer with attention",
}
"""Families whose default config is no model."""


def architectures() -> dict[str, str]:
    """Model type -> the class in SGLang that serves it."""
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    served: set[str] = set()
    for file in (SRT / "models").rglob("*.py"):
        served |= set(re.findall(rf"^class (\w+{ENDS})\b", file.read_text("utf-8"), re.MULTILINE))
    found: dict[str, str] = {}
    for mapping in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        for kind, names in mapping.items():
            for name in [names] if isinstance(names, str) else names:
                if name in served:
                    found.setdefault(kind, name)
    plain = {
        re.sub(r"[^a-z0-9]", "", re.sub(f"{ENDS}$", "", name).lower()): name for name in served
    }
    for kind in [*CONFIG_MAPPING.keys(), *_CONFIG_REGISTRY]:
        name = plain.get(re.sub(r"[^a-z0-9]", "", kind.lower()))
        if name:
            found.setdefault(kind, name)
    return found


def built(kind: str, architecture: str, folder: Path) -> tuple[dict[str, Any], Any]:
    """Return the family's config.json and SGLang's reading of it."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = (_CONFIG_REGISTRY.get(kind) or CONFIG_MAPPING[kind])()
    made.architectures = [architecture]
    folder.mkdir()
    made.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config |= {"architectures": [architecture], "model_type": config.get("model_type") or kind}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return config, ModelConfig(str(folder), dtype="bfloat16", trust_remote_code=False)


def expected(model: Any) -> int:
    """Bytes of a token in SGLang's pools of two-byte values (``pool_configurator.py``)."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    hybrid = mambaish_config(model)
    layers = len(hybrid.full_attention_layer_ids) if hybrid else model.num_attention_layers
    if model.attention_arch == AttentionArch.MLA:
        size = (model.kv_lora_rank + model.qk_rope_head_dim) * 2
        if is_deepseek_dsa(model.hf_config):
            index = model.hf_config.index_head_dim
            size += index + index // 128 * 4
        return layers * size

    def row(heads: int, key: int, value: int | None) -> int:
        return heads * (key + (value or key)) * 2

    full = row(model.get_num_kv_heads(1), model.head_dim, model.v_head_dim)
    windows = len(model.swa_attention_layer_ids or ()) if model.is_hybrid_swa else 0
    if not windows:
        return layers * full
    heads = model.get_swa_num_kv_heads(1)
    return (layers - windows) * full + windows * row(
        heads, model.swa_head_dim, model.swa_v_head_dim
    )


def test_every_family_that_can_be_built_is_counted_as_sglang_lays_it_out(tmp_path: Path) -> None:
    counted: Counter[str] = Counter()
    differs = {}
    for kind, architecture in sorted(architectures().items()):
        try:
            config, model = built(kind, architecture, tmp_path / kind)
            right = expected(model)
        except Exception:  # a default config is often no model
            counted["not built"] += 1
            continue
        try:
            ours: Any = kv_bytes_per_token(config)
        except CanopyError as error:
            ours = str(error)
        if ours == right:
            counted["equal"] += 1
        elif kind not in UNLIKE and not (kind in ASKS and isinstance(ours, str)):
            differs[kind] = (architecture, right, ours)
    assert differs == {}
    assert counted["equal"] > 100, counted
