"""Questions over documents as tokens, and their answers by full recompute and fused prefill."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from canopy_documents.fuse import rows as row_forward
from canopy_documents.fuse.cache import KVCache
from canopy_documents.fuse.encode import Encoder, stand_in
from canopy_documents.fuse.model import Model
from canopy_documents.quality.tasks import SYSTEM, Example
from canopy_documents.store.chunk import Chunk, FusedPrompt, PlacedChunk
from canopy_documents.text.variants import Place


@dataclass(slots=True)
class Case:
    """One example as tokens: a system prefix, the tokens of each document, and the question.

    stand_in: tokens of documents that are not in the prompt, to encode documents after.
    """

    prefix: list[int]
    documents: list[list[int]]
    question: list[int]
    answers: tuple[str, ...]
    task: str
    stand_in: list[int] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [*self.prefix, *(t for d in self.documents for t in d), *self.question]


def tokenise(tokenizer: Any, example: Example, count: int, document_tokens: int) -> Case:
    """Tokenise an example in pieces, so that a document always has the same ids.

    ``count`` documents are cut to ``document_tokens``, including the empty line between them: it marks a
    document's end, and without it the error of reuse nearly doubles (docs/research/documents.md).
    Without a chat template the prompt is plain text.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if getattr(tokenizer, "chat_template", None):
        mark = "\u241e"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": mark}]
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except Exception:  # templates without a system role raise their own error class
            messages = [{"role": "user", "content": f"{SYSTEM}\n\n{mark}"}]
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        before, after = text.split(mark)
    else:
        before, after = f"{SYSTEM}\n\n", "\nAnswer:"
    gap = ids("\n\n")
    room = max(0, document_tokens - len(gap))
    documents = [ids(d)[:room] + gap for d in example.documents[:count]]
    question = ids(f"Question: {example.question}{after}{example.lead}")
    return Case(
        ids(before), documents, question, example.answers, example.task, list(stand_in(ids))
    )


def prefix_for(case: Case, index: int) -> tuple[int, ...]:
    """Return the tokens that the document at ``index`` is encoded after."""
    return Place(index == 0, tuple(case.prefix), (tuple(case.stand_in),), True).acceptable()[0]


def encode_case(
    model: Model,
    case: Case,
    encoders: dict[tuple[int, ...], Encoder] | None = None,
    prefix_for: Callable[[Case, int], tuple[int, ...]] = prefix_for,
) -> list[Chunk]:
    """Encode each document after ``prefix_for(case, index)``.

    A prefix is computed once for all calls with the same ``encoders``.
    """
    encoder_of = {} if encoders is None else encoders
    chunks = []
    for index, document in enumerate(case.documents):
        prefix = prefix_for(case, index)
        if prefix not in encoder_of:
            encoder_of[prefix] = Encoder(model, prefix)
        chunks.append(encoder_of[prefix].encode(document))
    return chunks


def prompt_of_case(case: Case, chunks: Sequence[Chunk], device: torch.device) -> FusedPrompt:
    """Return the prompt of a case with ``chunks``, the KV of its documents."""
    at, placed = len(case.prefix), []
    for chunk in chunks:
        placed.append(PlacedChunk(chunk, at))
        at += len(chunk)
    return FusedPrompt(torch.tensor(case.ids, device=device), tuple(placed))


@torch.no_grad()
def greedy_steps(
    model: Model,
    cache: KVCache,
    n: int,
    begun: Sequence[int],
    count: int,
    end: int | None,
    rows: list[torch.Tensor] | None = None,
) -> Generator[None, None, list[int]]:
    """Decode at most ``count`` greedy tokens, continuing ``begun``, up to ``end``; yields before
    each.

    The cache holds n prompt tokens and all following tokens except the last, and is extended during
    decoding. rows: collects the logits ``[vocab]`` of each new token.
    """
    tokens = list(begun[:count])
    while len(tokens) < count and end not in tokens:
        yield
        at = n + len(tokens) - 1
        last = torch.tensor(tokens[-1:], device=model.device)
        row = model.logits(row_forward.prefill(model, last, cache.upto(at + 1), at))
        tokens.append(int(row.argmax()))
        if rows is not None:
            rows.append(row[0])
    return tokens


def text_of(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of an answer's tokens before the model's end token."""
    end = tokenizer.eos_token_id
    kept = list(tokens)
    return str(tokenizer.decode(kept[: kept.index(end)] if end in kept else kept))


def normalise(text: str) -> str:
    """Convert to lower case without punctuation, articles and extra spaces, as SQuAD's scorer."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def holds(text: str, answers: Iterable[str]) -> bool:
    """Return whether a text contains any of the answers."""
    words = f" {normalise(text)} "
    return any(f" {normalise(a)} " in words for a in answers if normalise(a))
