"""Numbers of docs/research/papers/wa.md."""

from __future__ import annotations

from typing import Any

from result_tables import Claim, Results, Row, items, listed, signed, table
from wa.section3_page import section_3

RESULTS = Results("wa")
SERVED = ("figure-25", "figure-26", "figure-27")
RATIOS = ("0", "1", "2")
"""CPU cache over HBM."""

PAPERS_WA, OURS = "WA (the paper's)", "WA, survival"
PROFILED = ", profiled"
"""Started from a profile of other traffic, as the paper's; else from nothing."""


def set_ups() -> list[tuple[str, dict[str, Any]]]:
    """Set-ups of Figures 25 to 27, the to-C traces first."""
    return [one for key in SERVED for one in RESULTS[key].items()]


def cells() -> list[tuple[str, dict[str, Any]]]:
    """Set-up and policies."""
    return [(name, case["policies"]) for name, case in set_ups()]


def losses(policy: str) -> tuple[int, int]:
    """Return the number of set-ups in which a policy hits less than LRU, and of all set-ups."""
    pairs = [
        (p[policy][r]["hit_percent"], p["LRU"][r]["hit_percent"])
        for _, p in cells()
        for r in RATIOS
    ]
    return sum(ours < lru for ours, lru in pairs), len(pairs)


def evaluation() -> list[Row]:
    """Return Figures 25 to 27 as one row: a claim holds if it holds for all three models."""
    most, shorter, lfu, together, texts = [], [], [], [], []
    for key in SERVED:
        name, case = next(iter(RESULTS[key].items()))
        policies = case["policies"]
        best = max(
            (p for p in policies if not p.startswith("WA")),
            key=lambda p: policies[p]["0"]["hit_percent"],
        )
        wa, other = policies[PAPERS_WA + PROFILED]["0"], policies[best]["0"]
        points = wa["hit_percent"] - other["hit_percent"]
        ttft = wa["qttft_s"] / other["qttft_s"] - 1
        others = [p["0"]["hit_percent"] for n, p in policies.items() if n != "LFU"]
        most.append(points >= 1.5)
        shorter.append(ttft <= -0.28)
        lfu.append(policies["LFU"]["0"]["hit_percent"] < min(others))
        together.append(_spread(policies, "2") < _spread(policies, "0"))
        texts.append(
            f"{name.partition(' on ')[0]} {signed(points)} points, TTFT {signed(100 * ttft, 0)} % ({best})"
        )
    claims = {
        "WA hits 1.5 to 3.9 points more than the best other": most,
        "28 to 42 % less queued TTFT": shorter,
        "LFU is worst": lfu,
        "room brings the policies together": together,
    }
    for says, holds in claims.items():
        if len(set(holds)) > 1:
            raise ValueError(f"{says!r} holds for some models only: give each figure a row")
    row = Row(
        "Figure 25, Figure 26, Figure 27",
        tuple(Claim(says, all(holds)) for says, holds in claims.items()),
        f"HBM alone, against the best other: {'; '.join(texts)}",
        " ".join(f"`{key}`" for key in SERVED),
        because="minutes of synthetic traffic, a cache that begins empty",
    )
    return [row, figure_28()]


def _spread(policies: dict[str, Any], ratio: str) -> float:
    hits = [case[ratio]["hit_percent"] for case in policies.values()]
    return max(hits) - min(hits)


def figure_28() -> Row:
    real = {
        k: v["5%"] for k, v in RESULTS["figure-28"]["conversation, share of its blocks"].items()
    }
    a = {k: v["1"] for k, v in RESULTS["figure-28"]["trace-a, CPU cache / HBM"].items()}

    def steps(hits: dict[str, float]) -> tuple[float, float]:
        base = max(hits["lru"], hits["gdfs"])
        return hits["+ distribution"] - base, hits["+ life"] - hits["+ distribution"]

    return Row(
        "Figure 28",
        (
            Claim("the distribution adds points", min(steps(a)[0], steps(real)[0]) > 0),
            Claim("the life regulator adds more", min(steps(a)[1], steps(real)[1]) > 0),
        ),
        f"conversation {listed(signed(s) for s in steps(real))}, trace-a "
        f"{listed(signed(s) for s in steps(a))} points",
        "`figure-28`",
        because="on trace-a the formula keeps slow conversations",
    )


def short() -> str:
    (ours, of), (papers, _), (ours_cold, _), (papers_cold, _) = (
        losses(arm + how) for how in (PROFILED, "") for arm in (OURS, PAPERS_WA)
    )
    qwen = RESULTS["figure-25"]["Qwen2-7B on trace-a"]["policies"]
    real = {
        k: v["5%"] for k, v in RESULTS["figure-28"]["conversation, share of its blocks"].items()
    }
    return (
        f"Where a cache is small against its trace `wa` wins (conversation at 5 % of its blocks: "
        f"{real['survival']:.1f} % of the blocks hit, LRU {real['lru']:.1f}, the paper's formula "
        f"{real['+ life']:.1f}). In the paper's serving set-ups it does not: from a profile of other "
        f"traffic, the default hits less than LRU in {ours} of {of} cells and the paper's formula in "
        f"{papers}; from nothing in {ours_cold} and {papers_cold}; mostly by less than a point. The worst "
        f"is Qwen2-7B without CPU cache, from a profile {_worst(qwen, PROFILED)}, from nothing "
        f"{_worst(qwen, '')}, and LRU {qwen['LRU']['0']['hit_percent']:.2f} %."
    )


def _worst(policies: dict[str, Any], how: str) -> str:
    ours, lru = policies[OURS + how]["0"], policies["LRU"]["0"]
    return f"{ours['hit_percent']:.2f} % at {ours['qttft_s'] / lru['qttft_s']:.1f} times LRU's queued TTFT"


def served() -> str:
    """Hits and queued TTFT of Figures 25 to 27 without host memory."""
    shown = ["LRU", "LFU", *(arm + how for arm in (PAPERS_WA, OURS) for how in ("", PROFILED))]
    rows = []
    for policy in shown:
        cases = [policies[policy]["0"] for _, policies in cells()]
        pairs = [(f"{c['hit_percent']:.2f}", f"{c['qttft_s']:.2f}") for c in cases]
        rows.append([policy, *(cell for pair in pairs for cell in pair)])
    heads = [cell for name, _ in cells() for cell in (f"{name}: hits, %", "TTFT, s")]
    return table(["HBM alone", *heads], rows, numbers=True)


def room() -> str:
    """The same with host memory, and FIFO, in one sentence."""
    fifo = max(abs(_points(p, "FIFO", ratio)) for _, p in cells() for ratio in RATIOS)
    texts = []
    for ratio, size in (("1", "as large as HBM"), ("2", "twice as large")):
        points = [
            _points(p, arm + how, ratio)
            for _, p in cells()
            for arm in (PAPERS_WA, OURS)
            for how in ("", PROFILED)
        ]
        texts.append(f"{size} {signed(min(points), 2)} to {signed(max(points), 2)}")
    warm = [
        p[OURS + PROFILED][r]["hit_percent"] - p[OURS][r]["hit_percent"]
        for _, p in cells()
        for r in RATIOS
    ]
    return (
        f"FIFO hits what LRU does, to {fifo:.2f} points. Points of the four WA rows over LRU with a "
        f"CPU cache {listed(texts)}. A profile changes the default's hits by "
        f"{signed(min(warm), 2)} to {signed(max(warm), 2)} points."
    )


def _points(policies: dict[str, Any], policy: str, ratio: str) -> float:
    hits: float = policies[policy][ratio]["hit_percent"] - policies["LRU"][ratio]["hit_percent"]
    return hits


def pauses() -> str:
    """Return the hits of `wa` that differ from LRU's."""
    shares = []
    for _, case in set_ups():
        hits = case["hits_by_pause"]
        lru, ours = hits["LRU"], hits[OURS]
        total = sum(lru.values())
        shares.append(
            [
                100 * sum(ours[p] - lru[p] for p in pauses) / total
                for pauses in (("under 1 min", "1 to 2 min"), ("over 2 min",))
            ]
        )
    early, late = (f"{signed(min(of))} to {signed(max(of))} %" for of in zip(*shares, strict=True))
    return (
        f"Without a queue, HBM alone, the default changes LRU's hits by {early} in turns that return "
        f"within two minutes, and by {late} in later ones."
    )


def ablation() -> str:
    """Block hits by step, four traces."""
    traces = RESULTS["figure-28"]
    labels = {
        "gdfs": "GDFS",
        "lru": "LRU",
        "+ distribution": "distribution",
        "+ life": "and life: the paper's",
        "given not used until t": "the distribution's hazard at t",
        "survival": "survival, our categories (`wa`)",
    }
    columns = {
        f"{name.partition(',')[0]}, {_size(size)}": (name, size)
        for name, hits in traces.items()
        for size in hits["lru"]
    }
    rows = [
        [label, *(f"{traces[name][key][size]:.2f}" for name, size in columns.values())]
        for key, label in labels.items()
    ]
    return table(["block hits, %", *columns], rows, numbers=True)


def _size(text: str) -> str:
    """Return the size of a cache: CPU cache over HBM, or a share of a trace's blocks."""
    return {"0": "HBM alone", "1": "and as much CPU cache", "5%": "5 %"}[text]


def all_rows() -> list[Row]:
    return [*section_3(), *evaluation()]


PARTS = {
    "items": lambda: items(all_rows()),
    "short": short,
    "served": served,
    "room": room,
    "ablation": ablation,
    "pauses": pauses,
}
