"""Models with sliding windows and with recurrent states, served: transformers' own text, and hits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.prompts import token_ids

VOCABULARY = 2048
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
KINDS = {
    # Windows of 64 tokens in three of four layers, whose KV has a pool of its own.
    "windows": (
        "Mellum",
        {
            "head_dim": 32,
            "sliding_window": 64,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "mlp_layer_types": ["dense"] * 4,
            "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
        },
    ),
    # Short convolutions in two of four layers: a state a sequence.
    "states": (
        "Lfm2",
        {
            "conv_L_cache": 3,
            "block_ff_dim": 256,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"] * 2,
        },
    ),
}


def build(kind: str, out: Path, tokenizer_from: Path):
    """A model whose answers depend on the whole prompt, saved in ``out``."""
    import torch
    import transformers

    family, options = KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**_SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    draw = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0.0, 0.15, generator=draw)
    model.save_pretrained(out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_from / name, out / name)
    return model


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    import torch

    made = model.generate(
        torch.tensor([prompt]), do_sample=False, min_new_tokens=tokens, max_new_tokens=tokens
    )
    return made[0, len(prompt) :].tolist()


def conversations() -> list[list[int]]:
    """Prompts that share beginnings, and grow; as many as the pools hold several times over."""
    prompts = []
    shared = [token % VOCABULARY for token in token_ids(150, seed=1)]
    for seed in range(2, 8):
        prompt = shared + [token % VOCABULARY for token in token_ids(60, seed)]
        for turn in range(3):
            prompts.append(list(prompt))
            prompt += [token % VOCABULARY for token in token_ids(40, seed=100 * seed + turn)]
    return prompts


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_text_is_transformers_and_sglangs_and_prefixes_are_found(server, smollm2, tmp_path, kind):
    model = build(kind, tmp_path / kind, smollm2)
    prompts = conversations()
    expected = [greedy(model, prompt, 8) for prompt in prompts]
    flags = ("--max-mamba-cache-size", "12") if kind == "states" else ()
    found = {}
    for policy in ("lru", "wa"):
        more = (
            ("--radix-eviction-policy-config", '{"states": "worth"}')
            if (policy, kind) == ("wa", "states")
            else ()
        )
        chosen = ("--radix-eviction-policy" if policy == "lru" else "--radix-eviction", policy)
        with server(tmp_path / kind, *chosen, *flags, *more, kv_tokens=1200) as client:
            answers = [client.generate(prompt, 8) for prompt in prompts]
            assert [answer["output_ids"] for answer in answers] == expected, policy
            again = client.generate(prompts[-1], 8)
            assert again["output_ids"] == expected[-1]
            assert again["meta_info"]["cached_tokens"] > 200
            found[policy] = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
            assert "Traceback" not in client.server.log_text()
            if policy == "wa":
                assert "CanopyTreeCore" in client.server.log_text()
    assert found["lru"] > 0
    assert found["wa"] >= 0.9 * found["lru"], found
