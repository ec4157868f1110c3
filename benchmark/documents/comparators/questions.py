"""Read questions from MuSiQue, HotpotQA or JSONL files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from canopy_documents.quality.tasks import Example
from sglang_canopy.errors import CanopyError


def read_examples(path: str | Path, limit: int | None = None) -> list[Example]:
    """Examples of a file: a JSON list or JSON lines.

    MuSiQue-style (``ctxs``, ``question``, ``answers``), HotpotQA-style (``context``,
    ``question``, ``answer``), or ``documents`` with ``question`` or ``prompt`` and optional
    ``answers``. Raises CanopyError with the line for anything else.
    """
    path = Path(path)
    if not path.is_file():
        raise CanopyError(f"--data {path} is not a file; give a JSON list or JSON lines")
    text = path.read_text()
    try:
        if text.lstrip().startswith("["):
            items = json.loads(text)
        else:
            items = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise CanopyError(f"--data {path} is not JSON: {error}") from None
    examples = [_example(item, i, path) for i, item in enumerate(items[:limit])]
    if not examples:
        raise CanopyError(f"--data {path} holds no question")
    return examples


def _example(item: Any, index: int, path: Path) -> Example:
    if isinstance(item, dict) and "ctxs" in item and "question" in item:
        texts = [f"{c.get('title', '')}\n{c['text']}".strip() for c in item["ctxs"]]
        return Example(tuple(texts), item["question"], _answers(item.get("answers")), "musique")
    if isinstance(item, dict) and "context" in item and "question" in item:
        texts = [f"{title}\n{''.join(lines)}" for title, lines in item["context"]]
        return Example(tuple(texts), item["question"], _answers(item.get("answer")), "hotpotqa")
    if isinstance(item, dict) and "documents" in item and ("question" in item or "prompt" in item):
        question = item.get("question") or item["prompt"]
        return Example(tuple(item["documents"]), question, _answers(item.get("answers")), "jsonl")
    raise CanopyError(
        f"{path}, item {index + 1}: expected 'ctxs' and 'question' (MuSiQue), 'context' and "
        f"'question' (HotpotQA), or 'documents' and 'question'"
    )


def _answers(answers: Any) -> tuple[str, ...]:
    """Return all right answers: a text, a list of texts, or WikiMQA's list of lists."""
    if isinstance(answers, list):
        return tuple(answer for item in answers for answer in _answers(item))
    return () if answers is None else (str(answers),)


def filler_from(examples: Sequence[Example], words: int = 70) -> list[str]:
    """Return texts for the synthetic tasks from real documents, cut to a few words."""
    return [" ".join(d.split()[:words]) for e in examples for d in e.documents if d.strip()]
