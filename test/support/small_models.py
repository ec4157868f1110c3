"""Small models of real architectures, as files, with random weights of a useful size.

SGLang's dummy weights are within a thousandth of zero. The output of such a model is almost
independent of the prompt, so equal answers would prove nothing."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tiny_model import TOKENIZER_FILES

VOCABULARY_TOKENS = 49152
"""Tokens of SmolLM2's tokenizer."""
COMMON_FIELDS: dict[str, Any] = {
    "vocab_size": VOCABULARY_TOKENS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 2, "head_dim": 32}
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 2.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
}
"""MLA. SGLang's CPU kernels require scaled rotary embeddings for it."""


def write_model(folder: Path, tokenizer: Path, family: dict[str, Any], **overrides: Any) -> Path:
    """Write a model of ``family``, one of the above, with the files of the folder ``tokenizer``. Return its folder."""
    fields = {**COMMON_FIELDS, **family, **overrides}
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            rescale(parameter)
    model.save_pretrained(folder)
    change_config(folder, **fields)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def change_config(model_folder: Path, **keys: Any) -> None:
    """Set keys of a model's configuration."""
    path = model_folder / "config.json"
    saved_fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**saved_fields, **keys}), encoding="utf-8")


def rescale(parameter: torch.Tensor) -> None:
    """Draw new values in place, which keep activations near size one."""
    if parameter.dim() <= 1:
        parameter.uniform_(0.5, 1.5)
    else:
        bound = math.sqrt(3 / parameter.shape[-1])
        parameter.uniform_(-bound, bound)


ADAPTER_RANK = 4


def write_adapter(folder: Path, model_folder: Path, seed: int) -> Path:
    """Write a LoRA adapter for a model of the family ``LLAMA``, large enough to change answers."""
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    hidden_size = config["hidden_size"]
    output_features = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "k_proj": config["num_key_value_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, features in output_features.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            shapes = {"A": (ADAPTER_RANK, hidden_size), "B": (features, ADAPTER_RANK)}
            for matrix, shape in shapes.items():
                noise = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
                weights[f"{path}.lora_{matrix}.weight"] = noise
    folder.mkdir(parents=True)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(model_folder),
                "r": ADAPTER_RANK,
                "lora_alpha": 2 * ADAPTER_RANK,
                "target_modules": sorted(output_features),
                "lora_dropout": 0.0,
                "bias": "none",
            }
        ),
        encoding="utf-8",
    )
    return folder
