"""Questions about a number hidden in essays, for ``python benchmark/documents/quality.py --data``.

    python benchmark/documents/needles.py --data needle_essays.tar.xz --tokens 4000 --count 10 -o n4k.jsonl
    python benchmark/documents/quality.py --model DIR --data n4k.jsonl --chunks 20 --chunk-tokens 400 --ratio 0,0.05,0.15 \\
        --encode prefix,mixed

Each prompt has documents of whole paragraphs of about 300 words; one of them, at a random place,
has the number of an invented archive, others have numbers of other archives.
"""

from __future__ import annotations

import argparse
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path

DOCUMENT_WORDS = 250
TOKENS_PER_WORD = 1.35
ARCHIVES = ("Kestrel", "Halden", "Orrin", "Maresh", "Tolven", "Brack", "Sural", "Ilvane")


def read_paragraphs(archive: Path) -> Iterator[str]:
    """Return the essays' paragraphs of twenty words or more, in order."""
    with tarfile.open(archive, "r:xz") as tar:
        for member in sorted(tar.getmembers(), key=lambda m: m.name):
            file = tar.extractfile(member) if member.name.endswith(".txt") else None
            if file is None:
                continue
            for text in file.read().decode("utf-8", "replace").split("\n\n"):
                words = text.split()
                if len(words) >= 20:
                    yield " ".join(words[:DOCUMENT_WORDS])


def read_documents(archive: Path) -> list[list[str]]:
    """Return documents, each a list of paragraphs of about ``DOCUMENT_WORDS`` words together."""
    documents: list[list[str]] = [[]]
    for text in read_paragraphs(archive):
        words = sum(len(paragraph.split()) for paragraph in (*documents[-1], text))
        if documents[-1] and words > DOCUMENT_WORDS:
            documents.append([])
        documents[-1].append(text)
    return documents


def make_example(rng: random.Random, pool: list[list[str]], tokens: int) -> dict[str, object]:
    """Return a question over about ``tokens`` tokens of documents."""
    document_count = max(3, round(tokens / (DOCUMENT_WORDS * TOKENS_PER_WORD)))
    documents = [list(d) for d in rng.sample(pool, document_count)]
    names = rng.sample(ARCHIVES, 3)
    numbers = rng.sample(range(1000, 10_000), 3)
    for name, number, document in zip(names, numbers, rng.sample(documents, 3)):
        place = rng.randrange(len(document) + 1)
        document.insert(place, f"The number of the {name} archive is {number}.")
    return {
        "documents": ["\n".join(d) for d in documents],
        "question": f"What is the number of the {names[0]} archive?",
        "answers": [str(numbers[0])],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="needle_essays.tar.xz")
    parser.add_argument("--tokens", type=int, default=4000, help="of a prompt's documents")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    rng, pool = random.Random(1), read_documents(args.data)
    lines = (json.dumps(make_example(rng, pool, args.tokens)) for _ in range(args.count))
    args.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
