"""Made-up questions over documents, with known answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_canopy.errors import CanopyError

SYNTHETIC = ("single", "split", "coreference")
SYSTEM = "Answer the question from the documents. Answer with a few words."


@dataclass(frozen=True, slots=True)
class Example:
    """One question over documents.

    documents: their texts; answers: accepted answers; task: its name; lead: start of the
    reply, given to the model (so that a small model answers at all).
    """

    documents: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    task: str
    lead: str = ""


_PEOPLE = "Alice Robert Maria Thomas Helen Victor Laura Daniel Julia Peter Nina Oscar"
_TRADES = "teacher baker painter doctor farmer sailor lawyer singer"
PEOPLE, TRADES = _PEOPLE.split(), _TRADES.split()


def make_examples(
    tasks: Sequence[str], count: int, filler: Sequence[str], documents: int = 6, seed: int = 0
) -> list[Example]:
    """Generate ``count`` examples of each task over ``documents`` filler texts.

    single: a fact in one sentence of one document. split: the fact's subject ends one document and
    its value begins the next. coreference: one document names a person, the next says "this
    teacher" and the value. The value is a number of four digits, because small models copy numbers
    reliably: SmolLM2-135M answers 20 of 21 with all documents in view, but 19 of 42 if the value is
    two words. A task beyond the model's ability would measure luck.
    """
    rng, examples = random.Random(seed), []
    for task in tasks:
        if task not in SYNTHETIC:
            raise CanopyError(f"task {task!r} is not known; allowed are {', '.join(SYNTHETIC)}")
    for _ in range(count):  # tasks alternate, so that an interrupted run has equal numbers of each
        for task in tasks:
            texts = [rng.choice(filler) for _ in range(documents)]
            examples.append(_make_example(task, rng, texts))
    return examples


def _make_example(task: str, rng: random.Random, documents: list[str]) -> Example:
    code = str(rng.randrange(1000, 10000))
    person, trade = rng.choice(PEOPLE), rng.choice(TRADES)
    index = rng.randrange(1, len(documents) - 1)
    if task == "single":
        words = documents[index].split()
        cut = rng.randrange(len(words) // 4, max(len(words) // 4 + 1, 3 * len(words) // 4))
        fact = f"The access code of {person} is {code}."
        documents[index] = " ".join([*words[:cut], fact, *words[cut:]])
    elif task == "split":
        documents[index] = f"{documents[index]}\nThe access code of {person}"
        documents[index + 1] = f"is {code}. {documents[index + 1]}"
    else:
        documents[index] = f"{documents[index]}\n{person} is a {trade}."
        documents[index + 1] = f"The access code of this {trade} is {code}. {documents[index + 1]}"
    lead = f"The access code of {person} is"
    return Example(tuple(documents), f"What is the access code of {person}?", (code,), task, lead)


def default_filler(words: int = 70) -> list[str]:
    """Return filler sentences about nothing that the tasks ask for."""
    rng, fillers = random.Random(1), []
    thing_names = "river market bridge garden station harbour museum library forest castle"
    things = thing_names.split()
    relations = [
        "was built near",
        "lies beside",
        "was painted by the people of",
        "can be seen from",
        "leads to",
    ]
    for _ in range(40):
        words_so_far: list[str] = []
        while len(words_so_far) < words:
            a, b = rng.choice(things), rng.choice(things)
            relation, year = rng.choice(relations), rng.randrange(1500, 1990)
            words_so_far += f"The old {a} {relation} the {b} in {year}.".split()
        fillers.append(" ".join(words_so_far))
    return fillers
