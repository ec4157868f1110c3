"""A small model of pictures and text (Qwen2-VL), as files, with random weights."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import torch

from support.small_models import COMMON_FIELDS, rescale
from tiny_model import TOKENIZER_FILES

RENAMED_TOKENS = {
    "<repo_name>": "<|vision_start|>",
    "<reponame>": "<|vision_end|>",
    "<file_sep>": "<|image_pad|>",
    "<filename>": "<|video_pad|>",
}
"""Tokens of SmolLM2's tokenizer, ids 3 to 6, which stand for Qwen's."""
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
PATCH_PIXELS = 14
TEXT_CONFIG: dict[str, Any] = {
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [4, 6, 6]},
}
TOKEN_IDS = {
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
    "image_token_id": 5,
    "video_token_id": 6,
    "vision_token_id": 7,
}
VISION_CONFIG = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 128}


def write_vision_model(folder: Path, tokenizer_folder: Path) -> Path:
    """Write weights, a tokenizer and an image processor. Return the folder."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    patch_fields = {"patch_size": PATCH_PIXELS, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision = {**VISION_CONFIG, **patch_fields}
    text = {**COMMON_FIELDS, **TEXT_CONFIG}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **TOKEN_IDS)
    torch.manual_seed(11)
    model = Qwen2VLForConditionalGeneration(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            rescale(parameter)
    model.save_pretrained(folder)
    saved_config = {
        **text,
        **TOKEN_IDS,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "vision_config": {**vision, "in_channels": 3, "in_chans": 3, "hidden_act": "quick_gelu"},
    }
    (folder / "config.json").write_text(json.dumps(saved_config), encoding="utf-8")
    for name in TOKENIZER_FILES:
        content = (tokenizer_folder / name).read_text(encoding="utf-8")
        for token, new_token in RENAMED_TOKENS.items():
            content = content.replace(json.dumps(token), json.dumps(new_token))
        (folder / name).write_text(content, encoding="utf-8")
    preprocessor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "patch_size": PATCH_PIXELS,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 112 * 112,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.25, 0.25, 0.25],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor), encoding="utf-8")
    return folder


def noise_picture(seed: int) -> str:
    """Return a picture of noise, 112 x 112 pixels, as a data URL."""
    from PIL import Image

    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (112, 112, 3), generator=generator, dtype=torch.uint8).numpy()
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, format="PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()
