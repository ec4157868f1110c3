"""Questions with six documents each, including the documents with the answer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from comparators.questions import read_examples

from canopy_documents.quality.answers import normalise
from canopy_documents.quality.tasks import Example

DOCUMENT_COUNT = 6
MAX_EVIDENCE_PASSAGES = 3
"""Maximum passages with the answer, so that other passages separate them."""
CONTEXT_CHARACTERS = 200
"""Characters kept before an answer that lies deeper in its passage than a chunk is long."""


def read_questions(data_folder: Path, name: str, count: int) -> list[Example]:
    """Return the first ``count`` questions of a data set that six of their documents can answer.

    name: ``musique`` or ``hotpotqa``, both in ``data_folder / "rag"``.
    """
    path = data_folder / "rag" / f"{name}_100.json"
    select = {"musique": _musique, "hotpotqa": _hotpotqa}[name]
    items = json.loads(path.read_text(encoding="utf-8"))
    examples = [select(item, example) for item, example in zip(items, read_examples(path))]
    return [example for example in examples if example is not None][:count]


def _musique(_: dict[str, Any], example: Example) -> Example | None:
    """Its long passages have no labels: take passages with an answer, cut to the text around it."""
    evidence = [i for i, d in enumerate(example.documents) if _find_answer(d, example.answers) >= 0]
    if not evidence:
        return None
    chosen = _with_others(evidence[:MAX_EVIDENCE_PASSAGES], len(example.documents))
    texts = tuple(_cut_to_answer(example.documents[i], example.answers) for i in chosen)
    return dataclasses.replace(example, documents=texts)


def _hotpotqa(item: dict[str, Any], example: Example) -> Example:
    """Its labels name the supporting documents."""
    titles = [title for title, _ in item["context"]]
    supporting = sorted({titles.index(title) for title, _ in item["supporting_facts"]})
    chosen = _with_others(supporting, len(titles))
    return dataclasses.replace(example, documents=tuple(example.documents[i] for i in chosen))


def _with_others(chosen: list[int], count: int) -> list[int]:
    """Six passages in the file's order: the needed passages, then the first others."""
    others = [i for i in range(count) if i not in chosen]
    return sorted([*chosen, *others][:DOCUMENT_COUNT])


def _find_answer(text: str, answers: tuple[str, ...]) -> int:
    lower = text.lower()
    return max((lower.find(a.lower()) for a in answers if normalise(a)), default=-1)


def _cut_to_answer(text: str, answers: tuple[str, ...]) -> str:
    place = _find_answer(text, answers)
    if place < 2 * CONTEXT_CHARACTERS:
        return text
    return text[place - CONTEXT_CHARACTERS :].split(" ", 1)[1]
