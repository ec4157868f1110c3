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
from canopy_documents.fuse.encode import Encoder, stand_in_prefix
from canopy_documents.fuse.model import Model
from canopy_documents.quality.tasks import SYSTEM, Example
from canopy_documents.store.chunk import Chunk, FusedPrompt, PlacedChunk
from canopy_documents.text.variants import PrefixVariants


@dataclass(slots=True)
class Case:
    """One example as tokens: a system prefix, the tokens of each document, and the question.

    stand_in_prefix: tokens of documents that are not in the prompt, to encode documents after.
    """

    prefix: list[int]
    documents: list[list[int]]
    question: list[int]
    answers: tuple[str, ...]
    task: str
    stand_in_prefix: list[int] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prefix, *(t for d in self.documents for t in d), *self.question]


def make_case(tokenizer: Any, example: Example, document_count: int, document_tokens: int) -> Case:
    """Tokenise an example in pieces, so that a document always has the same ids.

    ``document_count`` documents are cut to ``document_tokens``, including the empty line between
    them: it marks a document's end, and without it the error of reuse nearly doubles (docs/research/documents.md).
    Without a chat template the prompt is plain text.
    """

    def tokenize(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    if getattr(tokenizer, "chat_template", None):
        placeholder = "\u241e"
        as_text = {"tokenize": False, "add_generation_prompt": True}
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": placeholder}]
        try:
            text = tokenizer.apply_chat_template(messages, **as_text)
        except Exception:  # templates without a system role raise their own error class
            messages = [{"role": "user", "content": f"{SYSTEM}\n\n{placeholder}"}]
            text = tokenizer.apply_chat_template(messages, **as_text)
        text_before, text_after = text.split(placeholder)
    else:
        text_before, text_after = f"{SYSTEM}\n\n", "\nAnswer:"
    separator = tokenize("\n\n")
    max_text_tokens = max(0, document_tokens - len(separator))
    texts = example.documents[:document_count]
    documents = [tokenize(text)[:max_text_tokens] + separator for text in texts]
    question = tokenize(f"Question: {example.question}{text_after}{example.lead}")
    stand_in = list(stand_in_prefix(tokenize))
    return Case(tokenize(text_before), documents, question, example.answers, example.task, stand_in)


def prefix_for(case: Case, index: int) -> tuple[int, ...]:
    """Return the tokens that the document at ``index`` is encoded after."""
    stand_ins = (tuple(case.stand_in_prefix),)
    return PrefixVariants(index == 0, tuple(case.prefix), stand_ins, True).acceptable_prefixes()[0]


def encode_case(
    model: Model,
    case: Case,
    encoders: dict[tuple[int, ...], Encoder] | None = None,
    choose_prefix: Callable[[Case, int], tuple[int, ...]] = prefix_for,
) -> list[Chunk]:
    """Encode each document after ``choose_prefix(case, index)``.

    A prefix is computed once for all calls with the same ``encoders``.
    """
    encoder_by_prefix = {} if encoders is None else encoders
    chunks = []
    for index, document in enumerate(case.documents):
        prefix = choose_prefix(case, index)
        if prefix not in encoder_by_prefix:
            encoder_by_prefix[prefix] = Encoder(model, prefix)
        chunks.append(encoder_by_prefix[prefix].encode(document))
    return chunks


def prompt_of_case(case: Case, chunks: Sequence[Chunk], device: torch.device) -> FusedPrompt:
    """Return the prompt of a case with ``chunks``, the KV of its documents."""
    position, placed = len(case.prefix), []
    for chunk in chunks:
        placed.append(PlacedChunk(chunk, position))
        position += len(chunk)
    return FusedPrompt(torch.tensor(case.token_ids, device=device), tuple(placed))


@torch.no_grad()
def greedy_steps(
    model: Model,
    cache: KVCache,
    prompt_tokens: int,
    first_tokens: Sequence[int],
    max_tokens: int,
    end_token: int | None,
    step_logits: list[torch.Tensor] | None = None,
) -> Generator[None, None, list[int]]:
    """Decode at most ``max_tokens`` greedy tokens, continuing ``first_tokens``, up to ``end_token``.
    Yields before each.

    The cache has the KV of the prompt and of all following tokens except the last, and is extended
    during decoding. step_logits: collects the logits ``[vocab]`` of each new token.
    """
    tokens = list(first_tokens[:max_tokens])
    while len(tokens) < max_tokens and end_token not in tokens:
        yield
        position = prompt_tokens + len(tokens) - 1
        last_token = torch.tensor(tokens[-1:], device=model.device)
        end = position + 1
        hidden = row_forward.prefill(model, last_token, cache.truncated(end), position)
        logits = model.logits(hidden)
        tokens.append(int(logits.argmax()))
        if step_logits is not None:
            step_logits.append(logits[0])
    return tokens


def answer_text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Return the text of an answer's tokens before the model's end token."""
    end = tokenizer.eos_token_id
    answer = list(tokens)
    return str(tokenizer.decode(answer[: answer.index(end)] if end in answer else answer))


def normalise(text: str) -> str:
    """Convert to lower case without punctuation, articles and extra spaces, as SQuAD's scorer."""
    text = "".join(c for c in text.lower() if c not in set(string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def contains_answer(text: str, answers: Iterable[str]) -> bool:
    """Return whether a text contains any of the answers."""
    padded_text = f" {normalise(text)} "
    return any(f" {normalise(a)} " in padded_text for a in answers if normalise(a))
