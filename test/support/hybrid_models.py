"""Small models with sliding windows and with recurrent states, and what transformers answers."""

import shutil
from pathlib import Path
from typing import Any

from support.prompts import token_ids

VOCABULARY_TOKENS = 2048
ANSWER_TOKENS = 8
NEAR_TIE = 0.01
"""Largest difference of two logits in a tie."""
_COMMON_CONFIG = {
    "vocab_size": VOCABULARY_TOKENS,
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
MODELS = {
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


def build_model(component: str, folder: Path, tokenizer_folder: Path, **overrides: Any) -> Any:
    """A model whose answers depend on the whole prompt, saved in ``folder``; ``overrides`` replace keys of its config."""
    import torch
    import transformers

    family, options = MODELS[component]
    config = getattr(transformers, f"{family}Config")(**{**_COMMON_CONFIG, **options, **overrides})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    generator = torch.Generator().manual_seed(7)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0.0, 0.15, generator=generator)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    return model


def load_model(component: str, path: Path) -> Any:
    """Return transformers' model of a folder that ``build_model`` wrote."""
    import transformers

    model_class = getattr(transformers, f"{MODELS[component][0]}ForCausalLM")
    return model_class.from_pretrained(path).float().eval()


def answer_greedily(model: Any, prompt: list[int], answer_tokens: int) -> list[int]:
    """Return transformers' answer up to the first near tie of two tokens."""
    import torch

    generated = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        min_new_tokens=answer_tokens,
        max_new_tokens=answer_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top_logits = torch.cat(generated.logits).topk(2).values
    is_certain = ((top_logits[:, 0] - top_logits[:, 1]) > NEAR_TIE).tolist()
    return generated.sequences[0, len(prompt) :].tolist()[: (*is_certain, False).index(False)]


def answers_agree(answers: list[list[int]], expected: list[list[int]]) -> bool:
    """Whether every answer begins with transformers' certain tokens, which cover four fifths of all answers."""
    compared_tokens, answer_tokens = (sum(map(len, lists)) for lists in (expected, answers))
    is_equal = all(answer[: len(certain)] == certain for answer, certain in zip(answers, expected))
    return is_equal and compared_tokens >= 0.8 * answer_tokens


TURNS = 3
"""Turns of each conversation."""


def prompts_by_turn() -> list[list[int]]:
    """Return the same prompts, turn by turn over all conversations, so that a small device evicts each prefix."""
    prompts = conversation_prompts()
    return [prompt for turn in range(TURNS) for prompt in prompts[turn::TURNS]]


def conversation_prompts() -> list[list[int]]:
    """Growing prompts with shared beginnings, several times what the pools hold."""
    prompts = []
    shared = [token % VOCABULARY_TOKENS for token in token_ids(150, seed=1)]
    for seed in range(2, 8):
        prompt = shared + [token % VOCABULARY_TOKENS for token in token_ids(60, seed)]
        for turn in range(TURNS):
            prompts.append(list(prompt))
            prompt += [token % VOCABULARY_TOKENS for token in token_ids(40, seed=100 * seed + turn)]
    return prompts
