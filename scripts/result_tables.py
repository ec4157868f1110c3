"""Building blocks of rendered pages: result files, templates of prose, verdicts and tables."""

from __future__ import annotations

import functools
import json
import operator
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAPERS = ROOT / "benchmark" / "papers" / "results"


@functools.cache
def load(path: str) -> Any:
    """The JSON file at ``path`` in the repository."""
    return json.loads((ROOT / path).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Results:
    """Result files of a paper: ``results["figure-5"]`` is the result of its run."""

    paper: str

    def __getitem__(self, key: str) -> Any:
        return load(f"benchmark/papers/results/{self.paper}/{key}.json")["result"]


class Template(string.Formatter):
    """Sections (``## NAME``) of a Markdown file whose fields are values of a module beside it.

    ``{skew[A]:.1p}`` is the value 0.123 as `12.3 %`, and ``+`` never gives `-0.0`. A list is joined
    by commas and "and", a mapping has its keys in brackets, a function is called.
    """

    def __init__(self, path: Path, values: Any) -> None:
        self.values = values
        text = re.split(r"^## (.+)\n", path.read_text(encoding="utf-8"), flags=re.M)
        self.sections = dict(zip(text[1::2], map(str.strip, text[2::2])))

    def parts(self) -> dict[str, Callable[[], str]]:
        return {name: functools.partial(self.part, name) for name in self.sections}

    def part(self, name: str) -> str:
        text = self.sections[name]
        if text.startswith("| In the paper |"):
            text = "\n".join(map(self.item, text.splitlines()))
        return self.format(text)

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        found = getattr(self.values, str(key))
        return found() if callable(found) else found

    def format_field(self, value: Any, spec: str) -> str:
        if isinstance(value, dict):
            return ", ".join(f"{self.format_field(v, spec)} ({k})" for k, v in value.items())
        if isinstance(value, (list, tuple)):
            return listed(self.format_field(one, spec) for one in value)
        if spec.endswith("p"):
            return self.format_field(100 * value, f"{spec[:-1]}f") + " %"
        return str(format(value, spec.replace("+", "+z")))

    def item(self, line: str) -> str:
        """Return a row of a paper's items with its verdict.

        The row's second cell has statements, ``[TEXT](CONDITION)``; its fourth has the reason if
        one of them fails, or `calibrated` if our trace was made to hold them.
        """
        if line.startswith("|---"):
            return line
        item, says, here, reason, where = line.strip("| ").split(" | ")
        claims = [
            claim(text, self.judged(condition))
            for text, condition in re.findall(r"\[([^]]+)\]\(((?:[^()]|\(\))+)\)", says)
        ]
        if claims:
            says, reason = statements(claims), verdict(claims, reason.strip())
        return f"| {item} | {says} | {here} | {reason} | {where} |"

    def judged(self, condition: str) -> bool | list[bool]:
        """Whether ``FIELD`` is true, or ``FIELD OP VALUE`` holds for all values of the field.

        ``~`` is near, within a quarter unless ``within SHARE`` follows.
        """
        match = re.fullmatch(r"(.+?)(?: (<=?|>=?|==|~) (.+?)(?: within (\S+))?)?", condition)
        assert match
        name, symbol, limit, within = match.groups()
        value = self.get_field(name, (), {})[0]
        if symbol is None:
            return value if isinstance(value, list) else bool(value)
        is_number = re.fullmatch(r"-?[\d.]+", limit)
        bound = float(limit) if is_number else self.get_field(limit, (), {})[0]
        compare = functools.partial(near, within=float(within or 0.25))
        compare = compare if symbol == "~" else COMPARED[symbol]
        values = value.values() if isinstance(value, dict) else value
        values = values if isinstance(value, (dict, list, tuple)) else [value]
        return all(compare(one, bound) for one in values)


COMPARED: dict[str, Any] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, and whether our numbers agree with it."""

    says: str
    holds: bool
    mostly: bool = False
    """Whether it holds in more than half of its cells, if it has several."""


def claim(says: str, held: bool | list[bool]) -> Claim:
    """A statement, or one about many cells of a table: it holds if it does in every cell."""
    if isinstance(held, bool):
        return Claim(says, held)
    count = sum(held)
    return Claim(f"{says} (in {count} of {len(held)})", count == len(held), 2 * count > len(held))


def verdict(claims: Sequence[Claim], reason: str = "") -> str:
    """Return the verdict by rule.

    `reproduced`: every claim holds, in all its cells. `in part`: some claim does, or does in most of
    its cells. `differs`: none does. `calibrated`: our trace was made to hold it.
    """
    calibrated = reason == "calibrated"
    if all(claim.holds for claim in claims):
        return "calibrated" if calibrated else "reproduced"
    some = any(claim.holds or claim.mostly for claim in claims)
    because = f": {reason}" if reason and not calibrated else ""
    return ("in part" if some else "differs") + because


def statements(claims: Sequence[Claim]) -> str:
    """Return a paper's statements. If only some hold, the others are marked."""
    some = any(claim.holds for claim in claims)
    return "; ".join(
        f"(not) {c.says}" if some and not (c.holds or c.mostly) else c.says for c in claims
    )


KINDS = ("reproduced", "in part", "differs", "calibrated", "follows", "built", "not possible here")


def tally(page: str) -> dict[str, int]:
    """Count a paper's items by verdict, in the tables of its page."""
    counts = dict.fromkeys(KINDS, 0)
    for items, kind in re.findall(
        rf"^\| (.*?) \|.* \| ({'|'.join(KINDS)})[^|]* \| [^|]*\|$", page, re.M
    ):
        counts[kind] += len(items.split(", "))
    return counts


def near(ours: float, theirs: float, within: float = 0.25) -> bool:
    """Whether a number is reproduced: within a quarter of the paper's."""
    return abs(ours - theirs) <= within * abs(theirs)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> str:
    """A Markdown table; ``numbers``: all columns but the first are set flush right."""
    rule = f"|---|{('---:|' if numbers else '---|') * (len(header) - 1)}"
    first, *others = ("| " + " | ".join(cells) + " |" for cells in [header, *rows])
    return "\n".join([first, rule, *others])


def signed(value: float, digits: int = 1) -> str:
    """`+3.2`, and never `-0.0`."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"


def change(new: float, old: float, digits: int = 1) -> str:
    """`+3.2 %`"""
    return f"{signed(100 * (new / old - 1), digits)} %"


def percent(share: float, digits: int = 1) -> str:
    """0.123 as `12.3 %`"""
    return f"{100 * share:.{digits}f} %"


def listed(values: Iterable[Any], form: str = "{}") -> str:
    """`1, 2 and 3`"""
    texts = [form.format(value) for value in values]
    return " and ".join([", ".join(texts[:-1]), texts[-1]] if len(texts) > 1 else texts)
