"""A random Llama whose attention has something to choose from, as safetensors.

Dummy weights of a thousandth make every answer alike: an error in attention would change none. Here
each product keeps the spread of its inputs, so that a wrong key changes the answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from result import result
from safetensors.torch import save_file

SIZES = {
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
    "8b": {},
}
"""Differences from the bundle's configuration of an 8B model."""
SPREAD, EMBEDDED = 1.6, 20.0
"""Gain of a product and of the embeddings. A layer's output must not vanish next to these."""


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("bundled", type=Path, help="folder of the bundle's config and tokenizer")
    parser.add_argument("--size", choices=SIZES, required=True)
    return parser.parse_args(words)


def shapes(config: dict) -> Iterator[dict[str, tuple[int, ...]]]:
    """Yield names and shapes of each file's weights: first those outside the layers, then each layer."""
    hidden, inner, vocab = (config[n] for n in ("hidden_size", "intermediate_size", "vocab_size"))
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    yield {
        "model.embed_tokens.weight": (vocab, hidden),
        "lm_head.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        products = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        yield {f"model.layers.{layer}.{name}.weight": size for name, size in products.items()}


def weight(name: str, size: tuple[int, ...], make: torch.Generator) -> torch.Tensor:
    """Normalisations are 1; of all others a row's product with unit inputs has spread SPREAD."""
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)
    x = torch.randn(*size, device=make.device, generator=make)
    x *= SPREAD * size[1] ** -0.5 * (EMBEDDED if "embed" in name else 1.0)
    return x.bfloat16().cpu()


def write(out: Path, config: dict, device: str) -> int:
    """One file for each part of :func:`shapes`, and their index. Returns the bytes."""
    make = torch.Generator(device).manual_seed(0)
    files, total = {}, 0
    for at, part in enumerate(shapes(config)):
        weights = {name: weight(name, size, make) for name, size in part.items()}
        name = f"model-{at:05d}.safetensors"
        save_file(weights, out / name, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, name)
        total += sum(x.nbytes for x in weights.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def main() -> None:
    given = arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    config = json.loads((given.bundled / "config.json").read_text()) | SIZES[given.size]
    total = write(given.out, config, "cuda" if torch.cuda.is_available() else "cpu")
    (given.out / "config.json").write_text(json.dumps(config))
    for file in given.bundled.glob("tokenizer*.json"):
        shutil.copy(file, given.out)
    result("model", size=given.size, gib=round(total / 2**30, 2))


if __name__ == "__main__":
    main()
