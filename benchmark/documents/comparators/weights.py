"""Weights of a Hugging Face directory, or random ones, for an engine without a server."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from canopy_documents.store.chunk import Shape
from comparators.plain_model import Layer, PlainModel, Rope, from_config
from sglang_canopy.errors import CanopyError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


def load(path: str | Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> PlainModel:
    """Read a Hugging Face directory of a Llama, Mistral, Qwen2 or Qwen3 model.

    Raises CanopyError for a missing directory, another family, or a RoPE that cannot move.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        raise CanopyError(f"--model {path} has no config.json; give a Hugging Face model directory")
    from transformers import AutoConfig, AutoModelForCausalLM

    family = json.loads((path / "config.json").read_text()).get("model_type")
    if family not in FAMILIES:
        raise CanopyError(
            f"model type {family!r} is not supported for chunk reuse; supported are "
            f"{', '.join(FAMILIES)}"
        )
    config = AutoConfig.from_pretrained(path)
    rope = from_config(config)
    hf = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, low_cpu_mem_usage=True)
    return from_transformers(hf, rope, device, identity=_identity(path))


def from_transformers(
    hf: Any, rope: Rope | None = None, device: str = "cpu", identity: str = ""
) -> PlainModel:
    """Take over the weights of a loaded transformers model (Q, K, V and gate, up are joined).

    Raises CanopyError for a model with tensors that the engine does not read.
    """
    config, tensors = hf.config, hf.state_dict()
    heads = config.num_attention_heads
    window = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        window = None
    shape = Shape(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        eps=config.rms_norm_eps,
    )

    read_names = set()

    def take(name: str) -> torch.Tensor:
        read_names.add(name)
        return tensors[name].detach().to(device)

    def take_optional(name: str) -> torch.Tensor | None:
        return take(name) if name in tensors else None

    def join(prefix: str, *names: str, kind: str = "weight") -> torch.Tensor | None:
        keys = [f"{prefix}.{n}.{kind}" for n in names]
        return torch.cat([take(k) for k in keys]) if keys[0] in tensors else None

    def pair(prefix: str, *names: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        first, second = (f"{prefix}.{n}.weight" for n in names)
        return (take(first), take(second)) if first in tensors else None

    layers = []
    for i in range(shape.layers):
        layer_name = f"model.layers.{i}"
        qkv = join(f"{layer_name}.self_attn", "q_proj", "k_proj", "v_proj")
        gate_up = join(f"{layer_name}.mlp", "gate_proj", "up_proj")
        assert qkv is not None
        assert gate_up is not None
        layers.append(
            Layer(
                norm_in=take(f"{layer_name}.input_layernorm.weight"),
                qkv=qkv,
                qkv_bias=join(f"{layer_name}.self_attn", "q_proj", "k_proj", "v_proj", kind="bias"),
                out=take(f"{layer_name}.self_attn.o_proj.weight"),
                norm_mid=take(f"{layer_name}.post_attention_layernorm.weight"),
                gate_up=gate_up,
                down=take(f"{layer_name}.mlp.down_proj.weight"),
                head_norms=pair(f"{layer_name}.self_attn", "q_norm", "k_norm"),
                out_bias=take_optional(f"{layer_name}.self_attn.o_proj.bias"),
                mlp_biases=(
                    join(f"{layer_name}.mlp", "gate_proj", "up_proj", kind="bias"),
                    take_optional(f"{layer_name}.mlp.down_proj.bias"),
                ),
            )
        )
    embed = take("model.embed_tokens.weight")
    tied = getattr(config, "tie_word_embeddings", False) or "lm_head.weight" not in tensors
    rope = rope or from_config(config)
    rope = Rope(rope.inv_freq.to(device), rope.scaling)
    head = embed if tied else take("lm_head.weight")
    norm = take("model.norm.weight")
    if unread := sorted(set(tensors) - read_names - {"lm_head.weight"}):
        raise CanopyError(
            f"the engine does not read {len(unread)} tensors of this model, such as {unread[0]}; use a "
            "model without them"
        )
    return PlainModel(shape, tuple(layers), embed, norm, head, rope, identity, window=window)


def random_model(
    shape: Shape,
    intermediate: int,
    theta: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    identity: str = "random",
) -> PlainModel:
    """Return a model of a given shape with random weights, for tests and for timing other shapes."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        w = torch.empty(*size, dtype=dtype, device=device)
        return w.normal_(0.0, size[-1] ** -0.5, generator=generator)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=dtype, device=device)

    q_width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = tuple(
        Layer(
            ones(),
            normal(q_width + 2 * kv_width, shape.hidden),
            None,
            normal(shape.hidden, q_width),
            ones(),
            normal(2 * intermediate, shape.hidden),
            normal(shape.hidden, intermediate),
        )
        for _ in range(shape.layers)
    )
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=device) / shape.head_dim
    embed = normal(shape.vocab, shape.hidden)
    rope = Rope(1.0 / theta**steps)
    return PlainModel(shape, layers, embed, ones(), embed, rope, f"{identity}-{seed}")


def _identity(path: Path) -> str:
    """Return a digest of the config and of the weight files' headers and sizes, which is cheap."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        digest.update(file.name.encode())
        digest.update(str(file.stat().st_size).encode())
        with file.open("rb") as f:
            digest.update(f.read(65536))
            f.seek(max(0, file.stat().st_size // 2))
            digest.update(f.read(65536))
    return digest.hexdigest()[:32]
