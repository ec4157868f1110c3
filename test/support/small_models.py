"""Small models of real architectures with random weights of a useful size, as files.

SGLang's dummy weights are within a thousandth of zero. The output of such a model is almost independent
of the prompt, so equal answers would prove nothing.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tiny_model import TOKENIZER_FILES

VOCABULARY = 49152
"""Vocabulary size of SmolLM2's tokenizer."""
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
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
"""MLA. SGLang's code for a CPU requires scaled rotary embeddings there."""


def write_model(out: Path, tokenizer_from: Path, family: dict[str, Any], **overrides: Any) -> Path:
    """A model directory of ``family``, one of the above, with weights and a tokenizer."""
    fields = {**COMMON, **family, **overrides}
    config = transformers.AutoConfig.for_model(**fields)
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            rescale(parameter)
    model.save_pretrained(out)
    change_config(out, **fields)
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer_from / name, out / name)
    return out


def change_config(model: Path, **keys: Any) -> None:
    """Set keys of a model's configuration."""
    path = model / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**saved, **keys}), encoding="utf-8")


def rescale(parameter: torch.Tensor) -> None:
    """Values that keep activations of size one, in place."""
    if parameter.dim() <= 1:
        parameter.uniform_(0.5, 1.5)
    else:
        bound = math.sqrt(3 / parameter.shape[-1])
        parameter.uniform_(-bound, bound)


ADAPTER_RANK = 4


def write_adapter(out: Path, model: Path, seed: int) -> Path:
    """Write a LoRA adapter for a model of the family ``LLAMA``, large enough to change answers."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    hidden_size = config["hidden_size"]
    sizes = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "k_proj": config["num_key_value_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in sizes.items():
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for matrix, shape in (("A", (ADAPTER_RANK, hidden_size)), ("B", (size, ADAPTER_RANK))):
                noise = torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
                weights[f"{path}.lora_{matrix}.weight"] = noise
    out.mkdir(parents=True)
    save_file(weights, out / "adapter_model.safetensors")
    (out / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(model),
                "r": ADAPTER_RANK,
                "lora_alpha": 2 * ADAPTER_RANK,
                "target_modules": sorted(sizes),
                "lora_dropout": 0.0,
                "bias": "none",
            }
        ),
        encoding="utf-8",
    )
    return out
