"""Documents are found in a prompt's own tokens, and have the same tokens in every prompt."""

import random

import pytest

from canopy_documents.text.documents import find_documents, split_texts, stable_tokens
from support.words import Words

TEXTS = (
    "Paris is the capital of France.", "It's 3,000 km away", "def f(x):\n    return x + 1",
    "Zürich, 21 °C and rain", "* a list\n* of three things", "(in brackets) and (more)",
    "It was 1999 or so", '"quoted text" here', "    indented code\n    more of it",
)  # fmt: skip


@pytest.fixture(params=["words", "smollm2"])
def tokenizer(request):
    if request.param == "words":
        return Words()
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(request.getfixturevalue("smollm2"))


def test_a_document_has_the_same_tokens_between_any_texts(tokenizer) -> None:
    spaceless = ["北京是中国的首都。上海不是首都。"] if not isinstance(tokenizer, Words) else []
    rng, frames = random.Random(0), ["{}", "x {} y", "a\n{}\nb", "({})", "<user>{}\n\n", '"{}".']
    for text in (*TEXTS, *spaceless):
        tokens = stable_tokens(tokenizer, text)
        for frame in frames:
            surrounding = rng.sample(TEXTS, 2)
            parts = [surrounding[0], frame.format(text), surrounding[1]]
            ids = list(tokenizer.encode(rng.choice([" ", "\n", "\n###\n", "\n\n"]).join(parts)))
            bounds = find_documents(tokenizer, [text], ids)
            assert bounds, (text, frame)
            assert ids[bounds[0] : bounds[1]] == tokens


def test_only_the_first_and_the_last_word_of_a_document_are_omitted(tokenizer) -> None:
    text = "One two three four five six seven."
    assert tokenizer.decode(stable_tokens(tokenizer, text)) == " two three four five six"
    for text_of_two_words in ("", " ", "one", "one two"):
        assert stable_tokens(tokenizer, text_of_two_words) == []


def test_documents_are_found_in_order_without_overlap(tokenizer) -> None:
    text = "Read: a b c d, a b c d, e f g h, x y"
    ids = tokenizer.encode(text)
    bounds = find_documents(tokenizer, ["a b c d", "gone for good now", "a b c d", "e f g h"], ids)
    assert [tokenizer.decode(ids[start:end]) for start, end in zip(bounds[::2], bounds[1::2])] == [
        " b c", " b c", " f g",
    ]  # fmt: skip
    assert bounds == sorted(bounds)


def test_a_match_begins_at_a_token() -> None:
    class NumberTokenizer(Words):
        def encode(self, text, add_special_tokens=True):
            return [int(number) for number in text.split()]

        def convert_ids_to_tokens(self, ids):
            return ["Ġ"] * len(ids)

    # 256 and 1 have the bytes 0 1 0 ..: those of 1 begin one byte late
    assert find_documents(NumberTokenizer(), ["9 1 9"], [256, 9, 1, 9]) == [2, 3]


def test_between_two_separators_is_a_document() -> None:
    assert split_texts("system##one##two##why", "##") == ["one", "two"]
    assert (
        split_texts("one##two", "##")
        == split_texts("one", "##")
        == split_texts("a##b##c", None)
        == []
    )
