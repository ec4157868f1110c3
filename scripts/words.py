"""Count ten habits of prose that code of this field rarely has, by room.

    python scripts/words.py [ROOT]    # share of each room's texts with a habit
    python scripts/words.py --show    # every hit
    python scripts/words.py --lower   # lower the ceilings that test/docs/test_words.py enforces

A text is a docstring (of attributes too) or a block of comments. Each pattern was chosen on thirteen
code bases, whose share is at most 4.2 %, and judged on nineteen others.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import math
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CEILINGS = REPOSITORY / "test" / "docs" / "words.json"
"""Room -> largest percentage of its texts with a habit."""
TREES = ("python", "sgl-kernel/python", "benchmark", "scripts", "test")
DEEP = {"python/sglang_canopy/server", "python/canopy_lab/live", "python/canopy_lab/sim"}
"""Folders whose subfolders are rooms."""

HABITS = {
    # "What the tier holds" -> "Tokens in the tier" or "Return the tokens in the tier"
    "clause as a name": r"^(What|Who|Whose|Whom|How|Where|Which|Whatever|Whoever)\b(?!-)",
    # "Of the younger ones" -> "Younger requests"; "By id" -> "Requests by id"
    "preposition first": r"^(Of|By|As|Before|After|Above|Below|Beside|Under|Over|Until|With|Without|Among|Between)\b",
    # "the policy hears of it" -> "the policy receives it"; "is told" -> "is reported"
    "people for code": r"\b(hears?|heard|told|speaks?|spoken|believes?|heed\w*|says?|said|asks?|asked)\b",
    # "nobody waits" -> "no request waits"; "who is let in" -> "admitted requests"
    "nobody, who": r"\b([Nn]obody|[Ee]verybody|[Ww]hoever|[Ss]omebody|[Aa]nybody|[Ee]veryone|[Ss]omeone|[Aa]nyone|who|whom)\b",
    # "of so many blocks one" -> "one in ``one_in`` blocks"
    "so many": r"\bso (many|much|few)\b",
    # "what is cached of it" -> "its cached tokens"; "how many" -> "the number of"
    "clause inside": r"(?<=[a-z,;:)`] )(what (is|was|are|were|it|they|a|an|the|each|of|has|have|had|comes?|came|would|may|else|other|one|another|its)"
    r"|how (many|much|far|long|often|well|soon|old|large))\b",
    # "None where there is none" -> "None if there is no tenant"
    "where for if": r"\b[Ww]here (it|they|there|nothing|none|nobody|no|that|those|one|a|an|some|any|each|this|these)\b",
    # "a leaf goes, comes back" -> "is evicted, loaded"; "let in" -> "admitted"
    "motion for state": r"\b(goes|came|comes|stood|lies|hangs?|let in|looked at|left out|given up|held up|come back|taken (out|off)|under way)\b",
    # "those that", "the one", "of which" -> repeat the noun
    "pronoun chain": r"\b([Tt]hose (of|that|who|which|whose|in|for|with|under|before|behind|not)|ones? (that|which|who|whose|is|has|may|had|was)"
    r"|([Tt]he|[Aa]nother|[Ee]very|[Nn]o|[Oo]ther|[Ff]irst|[Ll]ast|[Oo]lder) ones?(?!-)|(of|for|by|from|below|above|beside) (which|whom|whose))\b",
    # "is none", "all but", "beside", "however many", "as far as" -> missing, except, in addition to, any number of, if
    "quaint": r"\b(beside|all but|but for|nothing but|none but|likewise|in vain|any more|once more|hardly|thereof|therein|by itself|by themselves|of itself"
    r"|however (many|much|long|few|often|old|large|small|little)|as (far|little|few|often|yet) as|(is|are|was|were|has|have|had|with|gives|names) none"
    r"|none (is|are|has|have)|at hand)\b",
}
PATTERNS = {name: re.compile(pattern) for name, pattern in HABITS.items()}

_NOT_PROSE = re.compile(
    r"^(!|-\*-|type:|noqa|mypy:|ruff:|fmt:|pragma|pylint|pyright|isort|SPDX|Copyright|Licensed|={3}|-{3}|#{2})",
    re.IGNORECASE,
)


def docstrings(source: str) -> list[str]:
    return [
        " ".join(node.value.value.split())
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def comments(source: str) -> list[str]:
    """Return the comments, with adjacent lines in one column joined."""
    found: list[str] = []
    last = None
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text, (row, column) = token.string.lstrip("#").strip(), token.start
        if not text or _NOT_PROSE.match(text):
            last = None
            continue
        if last == (row - 1, column):
            found[-1] += " " + text
        else:
            found.append(text)
        last = row, column
    return found


def prose(path: Path) -> list[str]:
    try:
        source = path.read_text(encoding="utf-8")
        return [text for text in docstrings(source) + comments(source) if text]
    except (SyntaxError, UnicodeDecodeError, ValueError, tokenize.TokenError):
        return []


def room_of(path: Path) -> str:
    """Return the room of a file, given relative to the repository."""
    parts = path.parent.parts
    depth = {"python": 3, "sgl-kernel": 3, "benchmark": 2, "test": 2}.get(parts[0], 1)
    room = "/".join(parts[:depth])
    return "/".join(parts[: depth + 1]) if room in DEEP else room


def rooms(files: Iterable[Path]) -> dict[str, list[str]]:
    """Return the texts of each room. ``files`` are relative to the repository."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(files):
        found[room_of(file)] += prose(REPOSITORY / file)
    return dict(found)


def python_files() -> list[Path]:
    return [
        file.relative_to(REPOSITORY)
        for tree in TREES
        for file in (REPOSITORY / tree).rglob("*.py")
        if "build" not in file.parts
    ]


def habits(text: str) -> list[str]:
    return [name for name, pattern in PATTERNS.items() if pattern.search(text)]


def percent(texts: list[str]) -> float:
    return 100.0 * sum(bool(habits(text)) for text in texts) / max(1, len(texts))


def ceilings() -> dict[str, int]:
    found: dict[str, int] = json.loads(CEILINGS.read_text(encoding="utf-8"))
    return found


def lower() -> None:
    """Write the ceilings, each the lower of the old one and today's percentage, rounded up."""
    old = ceilings() if CEILINGS.exists() else {}
    new = {
        room: min(old.get(room, 100), math.ceil(percent(texts)))
        for room, texts in rooms(python_files()).items()
        if texts
    }
    CEILINGS.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("root", nargs="?", type=Path, help="another folder of Python files")
    parser.add_argument("--show", action="store_true", help="print every text with a habit")
    parser.add_argument("--lower", action="store_true", help="lower the ceilings")
    given = parser.parse_args()
    if given.lower:
        lower()
        return
    if given.root is None:
        found = rooms(python_files())
    else:
        found = {str(file): prose(file) for file in sorted(given.root.rglob("*.py"))}
        if not given.show:
            found = {str(given.root): [text for texts in found.values() for text in texts]}
    if given.show:
        for room, texts in found.items():
            for text in texts:
                if named := habits(text):
                    print(f"{room} [{', '.join(named)}] {text}")
        return
    for room, texts in sorted(found.items(), key=lambda pair: -percent(pair[1])):
        print(f"{percent(texts):5.1f} %  {len(texts):5}  {room}")
    every = [text for texts in found.values() for text in texts]
    print(f"{percent(every):5.1f} %  {len(every):5}  all")
    for name, pattern in PATTERNS.items():
        share = sum(bool(pattern.search(text)) for text in every) / max(1, len(every))
        print(f"{100.0 * share:5.1f} %  {name}")


if __name__ == "__main__":
    main()
