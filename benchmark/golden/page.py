"""Sizes of the project against the goals, and its prose by room, as `size.py --write now.json` found them."""

from __future__ import annotations

from result_tables import load, table

NOW = "benchmark/golden/now.json"
READER = "benchmark/golden/results/reader.json"
GOALS = {
    "lines of `sglang_canopy`": (("lines_by_package", "sglang_canopy"), 25_000),
    "lines of `canopy_lab`": (("lines_by_package", "canopy_lab"), 21_500),
    "lines of `benchmark/`, without `golden/`": (("lines_beside", "benchmark"), 21_000),
    "lines of `test/`": (("lines_beside", "test"), 51_000),
    "words of `docs/`, tables included": (("words", "docs"), 44_000),
    "files of a request into the tree": (("request", "tree", "files"), 30),
}


def sizes() -> str:
    now = load(NOW)
    counted = [*now["lines_by_package"].values(), *now["lines_beside"].values()]
    rows = [row("lines of all trees, without `benchmark/golden/`", sum(counted), 133_000)]
    for what, (keys, goal) in GOALS.items():
        found = now
        for key in keys:
            found = found[key]
        rows.append(row(what, found, goal))
    return table(["", "now", "goal", ""], rows, numbers=True)


def row(what: str, found: int, goal: int) -> list[str]:
    return [what, f"{found:,}", f"{goal:,}", "met" if found <= goal else "not met"]


def prose() -> str:
    found = load(NOW)["prose"]
    rows = [
        [f"`{room}`", f"{one['texts']:,}", f"{one['percent']:.1f}"]
        for room, one in sorted(found.items(), key=lambda pair: -pair[1]["percent"])
    ]
    return table(["room", "texts", "% with a habit"], rows, numbers=True)


def all_prose() -> str:
    return f"{load(NOW)['prose']['all']['percent']:.1f} %"


def reader() -> str:
    """What a reader found in random texts; the texts found were rewritten before the next draw."""
    found = load(READER)
    draws = [str(draw["not_idiomatic"]) for draw in found["draws"]]
    return f"{', '.join(draws[:-1])} and {draws[-1]} of {found['texts']} (goal {found['limit']})"


PARTS = {"reader": reader, "sizes": sizes, "prose": prose, "all-prose": all_prose}
