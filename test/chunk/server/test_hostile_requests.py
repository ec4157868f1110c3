"""Requests that would make the HTTP process grow without bound, or that are no requests at all."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from canopy_chunks.server.http import entry
from canopy_chunks.server.options import Options
from canopy_chunks.text.documents import MAX_MARKED_TOKENS
from sglang_canopy.errors import CanopyError

DOCUMENT = 10_000


class Bytes:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.setattr(entry, "documents", type(entry.documents)(share=1.0))
    return SimpleNamespace(tokenizer=Bytes(), server_args=SimpleNamespace(tp_size=1))


def request(text, params=None, **fields):
    return SimpleNamespace(text=text, input_ids=None, sampling_params=params, **fields)


@pytest.fixture
def mark() -> str:
    return f"[[canopy:{entry.documents.add(range(DOCUMENT), None)}]]"


@pytest.mark.parametrize("custom", [{}, {"canopy_chunks": "off"}])
def test_a_few_bytes_of_marks_cannot_fill_the_memory(manager, mark, custom) -> None:
    many = MAX_MARKED_TOKENS // DOCUMENT + 1
    for text in (mark * many, [mark] * many):
        obj = request(text, {"custom_params": custom})
        with pytest.raises(CanopyError, match="at most 4,194,304"):
            entry.prepare(manager, obj, Options())
        assert obj.text is text, "nothing was made of it"


def test_marks_of_a_batch_become_documents_of_each_prompt(manager, mark) -> None:
    obj = request([f"a{mark}b", "c"], {})
    entry.prepare(manager, obj, Options())
    assert [len(ids) for ids in obj.input_ids] == [DOCUMENT + 2, 1]
    assert obj.sampling_params[0]["custom_params"] == {"canopy_chunks": [1, 1 + DOCUMENT]}


@pytest.mark.parametrize("params", [[], [{}], [{}, {}, {}], [{}, None]])
def test_a_batch_with_other_parameters_than_prompts_is_refused(manager, mark, params) -> None:
    with pytest.raises(CanopyError, match="sampling_params"):
        entry.prepare(manager, request([mark, mark], params), Options())
