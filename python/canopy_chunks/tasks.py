"""Questions over chunks: read from MuSiQue, HotpotQA or JSONL files, or made up with known answers."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_canopy.errors import CanopyError

SYNTHETIC = ("single", "split", "coreference")
SYSTEM = "Answer the question from the documents. Answer with a few words."


@dataclass(frozen=True, slots=True)
class Example:
    """documents: one text a chunk; answers: accepted answers, any of them; task: a name;
    lead: how the reply begins, given to the model (a small one then answers at all)."""

    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    task: str
    lead: str = ""


def read(path: str | Path, limit: int | None = None) -> list[Example]:
    """Examples of a file: a JSON list or JSON lines.

    MuSiQue-style (``ctxs``, ``question``, ``answers``), HotpotQA-style (``context``,
    ``question``, ``answer``), or ``documents`` with ``question`` or ``prompt`` and optional
    ``answers``. Raises CanopyError with the line for anything else.
    """
    path = Path(path)
    if not path.is_file():
        raise CanopyError(
            f"--data {path} is not a file; give a JSON list or JSON lines of questions"
        )
    text = path.read_text()
    try:
        if text.lstrip().startswith("["):
            items = json.loads(text)
        else:
            items = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise CanopyError(f"--data {path} is not JSON: {error}") from None
    found = [_example(item, i, path) for i, item in enumerate(items[:limit])]
    if not found:
        raise CanopyError(f"--data {path} holds no question")
    return found


def _example(item: Any, index: int, path: Path) -> Example:
    if isinstance(item, dict) and "ctxs" in item and "question" in item:
        texts = [f"{c.get('title', '')}\n{c['text']}".strip() for c in item["ctxs"]]
        return Example(tuple(texts), item["question"], tuple(item.get("answers", ())), "musique")
    if isinstance(item, dict) and "context" in item and "question" in item:
        texts = [f"{title}\n{''.join(lines)}" for title, lines in item["context"]]
        answers = (item["answer"],) if "answer" in item else ()
        return Example(tuple(texts), item["question"], answers, "hotpotqa")
    if isinstance(item, dict) and "documents" in item and ("question" in item or "prompt" in item):
        question = item.get("question") or item["prompt"]
        return Example(tuple(item["documents"]), question, tuple(item.get("answers", ())), "jsonl")
    raise CanopyError(
        f"{path}, item {index + 1}: expected 'ctxs' and 'question' (MuSiQue), 'context' and "
        f"'question' (HotpotQA), or 'documents' and 'question'"
    )


PEOPLE = [
    "Alice",
    "Robert",
    "Maria",
    "Thomas",
    "Helen",
    "Victor",
    "Laura",
    "Daniel",
    "Julia",
    "Peter",
    "Nina",
    "Oscar",
]
TRADES = ["teacher", "baker", "painter", "doctor", "farmer", "sailor", "lawyer", "singer"]


def synthetic(
    tasks: Sequence[str], count: int, filler: Sequence[str], chunks: int = 6, seed: int = 0
) -> list[Example]:
    """``count`` examples of each task over ``chunks`` filler texts.

    single: a fact in one sentence of one document; split: the fact's subject ends one document
    and its value begins the next; coreference: a person is named in one document, the next says
    "this teacher" and the value. The value is a number of four digits, because small models copy
    numbers reliably: SmolLM2-135M answers 20 of 21 with all documents in view, and 19 of 42 when
    the value is two words. A task the model fails anyway would measure luck.
    """
    rng, out = random.Random(seed), []
    for task in tasks:
        if task not in SYNTHETIC:
            raise CanopyError(f"task {task!r} is not known; allowed are {', '.join(SYNTHETIC)}")
    for _ in range(count):  # in turn, so that a run that is stopped has as many of each
        for task in tasks:
            out.append(_make(task, rng, [rng.choice(filler) for _ in range(chunks)]))
    return out


def _make(task: str, rng: random.Random, documents: list[str]) -> Example:
    code = str(rng.randrange(1000, 10000))
    who, trade = rng.choice(PEOPLE), rng.choice(TRADES)
    at = rng.randrange(1, len(documents) - 1)
    if task == "single":
        words = documents[at].split()
        cut = rng.randrange(len(words) // 4, max(len(words) // 4 + 1, 3 * len(words) // 4))
        fact = f"The access code of {who} is {code}."
        documents[at] = " ".join([*words[:cut], fact, *words[cut:]])
    elif task == "split":
        documents[at] = f"{documents[at]}\nThe access code of {who}"
        documents[at + 1] = f"is {code}. {documents[at + 1]}"
    else:
        documents[at] = f"{documents[at]}\n{who} is a {trade}."
        documents[at + 1] = f"The access code of this {trade} is {code}. {documents[at + 1]}"
    lead = f"The access code of {who} is"
    return Example(tuple(documents), f"What is the access code of {who}?", (code,), task, lead)


def filler_from(examples: Sequence[Example], words: int = 70) -> list[str]:
    """Texts for the synthetic tasks, out of real documents, cut to a few words."""
    return [" ".join(d.split()[:words]) for e in examples for d in e.documents if d.strip()]


def default_filler(words: int = 70) -> list[str]:
    """Filler when no data is given: plain sentences about nothing the tasks ask for."""
    rng, out = random.Random(1), []
    things = [
        "river",
        "market",
        "bridge",
        "garden",
        "station",
        "harbour",
        "museum",
        "library",
        "forest",
        "castle",
    ]
    acts = [
        "was built near",
        "lies beside",
        "was painted by the people of",
        "can be seen from",
        "leads to",
    ]
    for _ in range(40):
        text: list[str] = []
        while len(text) < words:
            a, b = rng.choice(things), rng.choice(things)
            text += (
                f"The old {a} {rng.choice(acts)} the {b} in {rng.randrange(1500, 1990)}.".split()
            )
        out.append(" ".join(text))
    return out
