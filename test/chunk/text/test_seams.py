"""A prompt that is tokenised document by document has the tokens of a plain one, with the separator that
the guide recommends."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from canopy_chunks.text.documents import Documents, split_documents, tokenise

RECOMMENDED = "\n###\n"
GUIDE = Path(__file__).parents[3] / "docs/guide/documents.md"
TEXTS = (
    "Paris is the capital of France.", "It's 3,000 km away", "def f(x):\n    return x",
    "Zürich, 21 °C", "* a list\n* of things", "(in brackets)", "1999", '"quoted"',
)  # fmt: skip


def differ(tokenizer, separator: str) -> int:
    """Return the number of prompts, of four documents each, that are tokenised differently."""
    count = 0
    for i in range(len(TEXTS)):
        documents = [TEXTS[(i + k) % len(TEXTS)] for k in range(4)]
        text = separator.join(["Answer from the documents.", *documents, f"Question {i}?"])
        pieces = split_documents(text, separator, Documents(), None)
        count += tokenise(tokenizer, pieces)[0] != tokenizer.encode(text)
    return count


def test_the_recommended_separator_leaves_a_prompts_tokens_alone(smollm2) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert json.dumps(RECOMMENDED) in GUIDE.read_text(encoding="utf-8")
    assert differ(tokenizer, RECOMMENDED) == 0
    assert differ(tokenizer, " # # ") > 0
