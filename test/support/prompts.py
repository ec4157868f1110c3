"""Prompts of random tokens for servers and schedulers."""

import random


def token_ids(count: int, seed: int) -> list[int]:
    """Return ``count`` random tokens that are in the vocabulary of every test model."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(count)]


def continuing_prompts(count: int, seed: int, max_shared_tokens: int) -> list[list[int]]:
    """Return prompts from a few tokens to several chunks. A third share up to ``max_shared_tokens`` tokens
    with another prompt."""
    rng = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        shared_prompt = prompts[rng.randrange(len(prompts))] if number % 3 == 2 else []
        new_tokens = token_ids(rng.choice([10, 70, 200, 600]), seed + number)
        prompts.append([*shared_prompt[:max_shared_tokens], *new_tokens])
    return prompts
