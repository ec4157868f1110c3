"""Small real architectures with random weights."""

import sys
from pathlib import Path

import torch
import transformers

sys.path.append(str(Path(__file__).parents[2] / "benchmark" / "documents"))

from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.model import Model
from canopy_kernel import pages

FAMILIES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama3-rope": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-biases": ("LlamaConfig", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 64}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None, "head_dim": 64}),
}


def build_model(family, dtype=torch.float32):
    """A transformers model with weights large enough for attention to matter."""
    config_name, model_name, options = FAMILIES[family]
    config = getattr(transformers, config_name)(
        vocab_size=300,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.15,
        **options,
    )
    torch.manual_seed(7)
    model = getattr(transformers, model_name)(config)
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):  # made as ones, which would hide them
            torch.nn.init.uniform_(weight, 0.5, 2.0)
        if name.endswith(".bias"):  # made as zeros
            torch.nn.init.uniform_(weight, -0.5, 0.5)
    return model.to(dtype).eval()


def paged_cache(model: Model, token_count: int, page_size: int, layout: str = "NHD") -> KVCache:
    """A cache of ``token_count`` tokens, whose pages are scattered over a pool as a server's are."""
    shape = model.shape
    page_count = -(-token_count // page_size)
    generator = torch.Generator().manual_seed(0)
    page_order = torch.randperm(page_count + 3, generator=generator)[:page_count]
    slots = (page_order[:, None] * page_size + torch.arange(page_size)).reshape(-1)[:token_count]
    page_shape = (page_size, shape.kv_heads) if layout == "NHD" else (shape.kv_heads, page_size)
    pool_shape = (shape.layers, page_count + 3, *page_shape, shape.head_dim)
    pools = [torch.zeros(pool_shape, dtype=model.dtype, device=model.device) for _ in range(2)]
    k, v = ([pages.view(layer, layout) for layer in pool] for pool in pools)
    return KVCache(k, v, slots.to(model.device))
