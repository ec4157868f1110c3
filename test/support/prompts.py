"""Prompts of random tokens for servers and schedulers."""

import random


def token_ids(count: int, seed: int) -> list[int]:
    """Return ``count`` tokens that are in the vocabulary of every test model."""
    draw = random.Random(seed)
    return [draw.randrange(100, 40_000) for _ in range(count)]


def continuing_prompts(count: int, seed: int, most_shared: int) -> list[list[int]]:
    """Return prompts from a few tokens to several chunks. A third share up to ``most_shared`` tokens
    with another prompt."""
    draw = random.Random(seed)
    prompts: list[list[int]] = []
    for number in range(count):
        shared = prompts[draw.randrange(len(prompts))] if number % 3 == 2 else []
        new_tokens = token_ids(draw.choice([10, 70, 200, 600]), seed + number)
        prompts.append([*shared[:most_shared], *new_tokens])
    return prompts
