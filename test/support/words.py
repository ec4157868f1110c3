"""A tokenizer of words, which joins a word with the space before it as byte-level tokenizers do."""

import re


class Words:
    """Numbers words in the order of their first use; ``decode`` returns the exact text."""

    eos_token_id = None

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}
        self.tokens: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        tokens = re.findall(r"<\w+>| ?\w+| ?[^\w\s<]+\n*|\s+|<", text)
        for token in tokens:
            if token not in self.ids:
                self.ids[token] = len(self.tokens)
                self.tokens.append(token)
        return [self.ids[token] for token in tokens]

    def __call__(self, texts: list[str], add_special_tokens: bool) -> dict[str, list[list[int]]]:
        return {"input_ids": [self.encode(text, add_special_tokens) for text in texts]}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.tokens[token_id].replace(" ", "Ġ") for token_id in ids]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.tokens[token_id] for token_id in ids)
