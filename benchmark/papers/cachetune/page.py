"""Values of page.md, from the result files."""

from __future__ import annotations

import statistics
from typing import Any

from result_tables import Results, listed, signed, table

R = Results("cachetune")
SETS = {"MuSiQue": "figures-3-7-9-10-musique", "HotpotQA": "figures-3-7-9-10-hotpotqa"}
SURE = 2.0
"""Two arms differ if their paired difference exceeds this number of standard errors."""
ENCODED = {"bos": "behind BOS", "alone": "behind nothing"}

SELECTORS = {
    "no recompute": "no recompute",
    "frequency": "low frequencies, the paper's",
    "high-frequency": "high frequencies",
    "first-k": "first 15 %",
    "epic": "EPIC, 16 tokens",
    "hkvd": "CacheBlend (`hkvd`)",
    "prophetkv": "after ProphetKV",
    "question": "`question`, the default here",
}


def on_sets(arm: str, field: str) -> list[Any]:
    """Return an arm's value on both data sets."""
    return [R[key]["arms"][arm][field] for key in SETS.values()]


def minus(one: str, other: str, field: str = "kl") -> tuple[float, float]:
    """The mean difference of two arms on the same questions of both data sets, and its error."""
    found = (on_sets(arm, f"{field}_by_question") for arm in (one, other))
    pairs = [a - b for of in zip(*found) for a, b in zip(*of, strict=True)]
    return statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5


def difference(one: str, other: str) -> str:
    """`-0.012 ± 0.004`"""
    mean, error = minus(one, other)
    return f"{signed(mean, 3)} ± {error:.3f}"


class Pair:
    """``self["ONE, OTHER"]`` compares two arms, both encoded behind BOS."""

    def __init__(self, compare: Any) -> None:
        self.compare = compare

    def __getitem__(self, pair: str) -> Any:
        return self.compare(*(f"{arm}, bos" for arm in pair.split(", ")))


def _below(one: str, other: str) -> bool:
    mean, error = minus(one, other)
    return mean < -SURE * error


kl = Pair(difference)
below = Pair(_below)
"""Whether one arm is significantly nearer to full recompute than the other."""
below_both = below["frequency, hkvd"] and below["frequency, epic"]
keys = " ".join(f"`{key}`" for key in SETS.values())
questions = sum(R[key]["questions"] for key in SETS.values())

lowest = {of: [e[of]["lowest_20"] for e in R["figure-2"]["energy"].values()] for of in ("K", "V")}
far = {
    arm: on_sets(f"{arm}, bos", "attention")
    for arm in ("no recompute", "frequency", "high-frequency")
}
tenth_less = {
    arm: all(a < 0.9 * b for a, b in zip(of, far["no recompute"])) for arm, of in far.items()
}
"""Whether the distance of the attention falls by a tenth on both data sets."""
keeps_distance = not tenth_less["high-frequency"]
attention = "; ".join(
    f"{text} "
    + ", ".join(
        f"{label} {listed(on_sets(f'{arm}, {how}', 'attention'), '{:.2f}')}"
        for arm, label in (
            ("no recompute", "none"),
            ("frequency", "low"),
            ("high-frequency", "high"),
        )
    )
    for how, text in ENCODED.items()
)
best = {
    pool: [
        float(min(ratios, key=lambda r, ratios=ratios, size=size: ratios[r][size]))  # type: ignore[misc]
        for size in ("96", "192", "384")
    ]
    for pool, ratios in R["figure-4"]["seconds_by_pool_ratio_chunk_size"].items()
}
best_ratios = "; ".join(f"{pool}: {listed(ratios)}" for pool, ratios in best.items())

speed = on_sets("frequency, bos", "speedup")
speed_as_printed = all(3.7 <= s <= 4.9 for s in speed)
by_ratio = [on_sets(f"frequency{r}, bos", "kl") for r in (" r=0.05", "", " r=0.25")]
kl_by_ratio = "; ".join(listed(of, "{:.3f}") for of in zip(*by_ratio))
few, many = (on_sets(f"frequency r={r}, bos", "cpu_s") for r in ("0.05", "0.25"))
slower = all(a < b for a, b in zip(few, many))

same = [
    R["figure-2"]["chosen"][f"same as alpha 0.5, alpha {a}"] for a in ("0.3", "0.4", "0.6", "0.7")
]
error = {p: e["mean_relative_error"] for p, e in R["figure-4"]["equation_10"].items()}
exact = R["algorithm-1"]["by_noise_of_the_prior"]["0.0"]
search_finds = exact["as printed"]["wrong"] < 0.05 * R["algorithm-1"]["rooflines"]

random = {how: on_sets(f"random, {how}", "kl") for how in ENCODED}
behind_system = {a: difference(f"{a}, bos", f"{a}, prefix") for a in ("question", "no recompute")}


def selectors() -> str:
    """Each selector's KL less that of random tokens on the same questions, with standard errors."""
    rows = []
    for arm, label in SELECTORS.items():
        cells = [difference(f"{arm}, {how}", f"random, {how}") for how in ENCODED]
        rows.append([label, *cells, f"{on_sets(f'{arm}, bos', 'speedup')[0]:.1f}"])
    header = ["KL minus that of random tokens", *ENCODED.values(), "times full's speed"]
    return table(header, rows, numbers=True)


def pools() -> str:
    keys = ("r0", "speedup_fixed", "speedup_adaptive", "ratio")
    rows = [
        [name, *(f"{p[key]:.2f}" for key in keys)] for name, p in R["figure-11"]["pools"].items()
    ]
    head = ["pool", "r0", "fixed 15 %, times full", "searched, times full", "at r"]
    return table(head, rows, numbers=True)
