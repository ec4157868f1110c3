"""The pages describe the current state; the history is in git."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OF_THE_PAST = re.compile(
    r"\b(used to|since then|before this|no longer|formerly|until then)\b", re.I
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_describe_the_present_only(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    told = [f"{n}: {m[0]}" for n, line in enumerate(lines, 1) if (m := OF_THE_PAST.search(line))]
    assert told == [], f"{page.relative_to(ROOT)}: say what is true today"


def test_phrases_are_found_as_words() -> None:
    assert OF_THE_PAST.search("Since then it is faster.")
    assert not OF_THE_PAST.search("hidden states of reused tokens")
