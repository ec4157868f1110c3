"""Figures of docs/research/papers/cachetune.md."""

from __future__ import annotations

import statistics
from typing import Any

from result_tables import Claim, Results, Row, items, listed, percent, signed, table

RESULTS = Results("cachetune")
SETS = {"MuSiQue": "figures-3-7-9-10-musique", "HotpotQA": "figures-3-7-9-10-hotpotqa"}
KEYS = " ".join(f"`{key}`" for key in SETS.values())
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


def arms(data: str) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = RESULTS[SETS[data]]["arms"]
    return result


def means(arm: str, field: str = "kl", digits: int = 3) -> str:
    """Return the mean on both data sets, as text."""
    return listed((arms(data)[arm][field] for data in SETS), f"{{:.{digits}f}}")


def minus(one: str, other: str, field: str = "kl") -> tuple[float, float]:
    """The mean difference of two arms on the same questions of both data sets, and its error."""
    pairs = [
        a - b
        for data in SETS
        for a, b in zip(
            *(arms(data)[arm][f"{field}_by_question"] for arm in (one, other)), strict=True
        )
    ]
    return statistics.mean(pairs), statistics.stdev(pairs) / len(pairs) ** 0.5


def below(one: str, other: str, how: str = "bos") -> bool:
    """Return whether one arm is significantly nearer to full recompute than the other."""
    mean, error = minus(f"{one}, {how}", f"{other}, {how}")
    return mean < -SURE * error


def difference(one: str, other: str, how: str = "bos", other_how: str | None = None) -> str:
    """`-0.012 ± 0.004`; ``how`` and ``other_how`` (the same, unless given): what is encoded behind."""
    mean, error = minus(f"{one}, {how}", f"{other}, {other_how or how}")
    return f"{signed(mean, 3)} ± {error:.3f}"


def figures_2_to_4() -> list[Row]:
    energy = RESULTS["figure-2"]["energy"].values()
    k, v = ([e[name]["lowest_20"] for e in energy] for name in ("K", "V"))
    far = {
        name: [arms(data)[f"{name}, bos"]["attention"] for data in SETS]
        for name in ("no recompute", "frequency", "high-frequency")
    }
    seconds = RESULTS["figure-4"]["seconds_by_pool_ratio_chunk_size"]
    best = {
        pool: {size: _best(ratios, size) for size in ("96", "192", "384")}
        for pool, ratios in seconds.items()
    }
    return [
        Row(
            "Figure 2",
            (
                Claim(
                    "the lowest 20 % of frequencies hold most of K's energy (over 80 %)",
                    min(k) > 0.8,
                ),
                Claim("of V's", min(v) > 0.8),
            ),
            f"K {listed(map(percent, k))}, V {listed(map(percent, v))} (MuSiQue, HotpotQA)",
            "`figure-2`",
            because="on a model this small",
        ),
        Row(
            "Figure 3",
            (
                Claim(
                    "low frequencies restore the question's attention",
                    _tenth_less(far["frequency"], far["no recompute"]),
                ),
                Claim(
                    "high ones do not", not _tenth_less(far["high-frequency"], far["no recompute"])
                ),
            ),
            "distance to full recompute's: "
            + "; ".join(
                f"{text} "
                + ", ".join(
                    f"{label} {means(f'{arm}, {how}', 'attention', 2)}"
                    for arm, label in (
                        ("no recompute", "none"),
                        ("frequency", "low"),
                        ("high-frequency", "high"),
                    )
                )
                for how, text in ENCODED.items()
            ),
            KEYS,
            because="low frequencies leave the attention as it is; high ones repair sinks at the chunks' first tokens",
        ),
        Row(
            "Figure 4",
            (
                Claim("CPU memory wants little recompute", max(best["memory"].values()) == 0),
                Claim("a hard disk more, at every chunk size", min(best["as HDD"].values()) > 0),
            ),
            "least TTFT at r = "
            + "; ".join(f"{pool}: {listed(best[pool].values())}" for pool in best)
            + " (chunks of 96, 192, 384 tokens)",
            "`figure-4`",
        ),
    ]


def _tenth_less(far: list[float], none: list[float]) -> bool:
    """Return whether the distance falls by a tenth on both data sets."""
    return all(a < 0.9 * b for a, b in zip(far, none, strict=True))


def _best(ratios: dict[str, dict[str, float]], size: str) -> float:
    return float(min(ratios, key=lambda r: ratios[r][size]))


def quality() -> list[Row]:
    speed = [arms(data)["frequency, bos"]["speedup"] for data in SETS]
    load = RESULTS["figure-8"]["methods"]["frequency, alone"]["saturation_times_full"]
    ratios = ("frequency r=0.05", "frequency", "frequency r=0.25")
    return [
        Row(
            "Figure 7",
            (
                Claim(
                    "3.7 to 4.9 times full recompute's speed at 15 %",
                    all(3.7 <= s <= 4.9 for s in speed),
                ),
                Claim("closer to it than full reuse", below("frequency", "no recompute")),
                Claim(
                    "than CacheBlend and EPIC",
                    below("frequency", "hkvd") and below("frequency", "epic"),
                ),
            ),
            f"{listed(speed, '{:.1f}')} times; KL behind BOS, minus full reuse's: "
            f"{difference('frequency', 'no recompute')}; minus CacheBlend's: "
            f"{difference('frequency', 'hkvd')}; minus EPIC's: "
            f"{difference('frequency', 'epic')}",
            KEYS,
            because="low frequencies repair next to nothing ([figures](../../../docs/research/papers/cachetune.md#behind-bos-and-behind-nothing))",
        ),
        Row(
            "Figure 8",
            shows="throughput 3.9 to 6.2 times full recompute's",
            here=f"{load:.1f} times, arrivals simulated; [served points](../../../docs/research/chunks-serving.md#request-rate) are few",
            where="`figure-8`",
            follows="Figure 7's factor by definition",
        ),
        Row(
            "Figure 9",
            (
                Claim(
                    "speed-up falls from 5 to 25 %",
                    all(
                        arms(d)[f"{ratios[0]}, bos"]["cpu_s"]
                        < arms(d)[f"{ratios[2]}, bos"]["cpu_s"]
                        for d in SETS
                    ),
                ),
                Claim("quality rises", below(ratios[2], ratios[0])),
            ),
            "KL behind BOS at 5, 15 and 25 %: "
            + "; ".join(
                listed((arms(d)[f"{a}, bos"]["kl"] for a in ratios), "{:.3f}") for d in SETS
            )
            + f"; 25 minus 5 %: {difference(ratios[2], ratios[0])}",
            KEYS,
            because="more low-frequency tokens repair nothing",
        ),
        Row(
            "Figure 10",
            (
                Claim("low frequencies beat random tokens", below("frequency", "random")),
                Claim("and high ones", below("frequency", "high-frequency")),
            ),
            f"KL behind BOS, low minus random: {difference('frequency', 'random')}; low minus "
            f"high: {difference('frequency', 'high-frequency')}",
            KEYS,
            because="they are worse than both, behind BOS as behind nothing",
        ),
    ]


def speed() -> list[Row]:
    pools = RESULTS["figure-11"]["pools"]
    error = {
        pool: e["mean_relative_error"] for pool, e in RESULTS["figure-4"]["equation_10"].items()
    }
    chosen = RESULTS["figure-2"]["chosen"]
    same = [chosen[f"same as alpha 0.5, alpha {a}"] for a in ("0.3", "0.4", "0.6", "0.7")]
    search = RESULTS["algorithm-1"]
    exact = search["by_noise_of_the_prior"]["0.0"]
    return [
        Row(
            "Figure 11",
            (
                Claim(
                    "on HDD the searched ratio beats a fixed 15 %",
                    pools["as HDD"]["speedup_adaptive"] > pools["as HDD"]["speedup_fixed"],
                ),
                Claim(
                    "on SSD", pools["as SSD"]["speedup_adaptive"] > pools["as SSD"]["speedup_fixed"]
                ),
            ),
            "; ".join(
                f"{name} {pools[name]['speedup_fixed']:.2f} and {pools[name]['speedup_adaptive']:.2f} times full"
                for name in ("as HDD", "as SSD")
            )
            + " ([pools slowed to the paper's balance](#pools))",
            "`figure-11`",
        ),
        Row(
            "Table 2",
            shows="TTFT with the cache in GPU and in CPU memory",
            here=f"one tier lower: memory {pools['memory']['fixed_s']:.2f} s, a cold disk "
            f"{pools['cold disk']['fixed_s']:.2f} s, full {pools['memory']['full_s']:.2f} s",
            where="`figure-11`",
            impossible="a GPU beside its host",
        ),
        Row(
            "Equation 7",
            (
                Claim(
                    "the top rN of each layer; stable for alpha from 0.3 to 0.7 (over 80 % the same)",
                    min(same) > 0.8,
                ),
            ),
            f"{listed(same, '{:.0%}')} are those of 0.5. A server takes one set for all layers, by the mean score; "
            "the printed sets, one a layer, are `frequency-per-layer`: their union is computed",
            "`figure-2` `python/canopy_chunks/fuse/selectors/frequency.py` `benchmark/chunk/comparators/per_layer.py` `test/chunk/fuse/test_selectors.py`",
            because="counted over chunks of 160 tokens of this model",
        ),
        Row(
            "Equation 10",
            (
                Claim(
                    "TTFT is the sum over layers and an overhead: nearer with it in memory",
                    error["memory"]["with t_o"] < error["memory"]["without"],
                ),
                Claim("in a slow pool", error["as HDD"]["with t_o"] < error["as HDD"]["without"]),
            ),
            "; ".join(
                f"{pool}: mean error {percent(e['with t_o'], 0)}, without {percent(e['without'], 0)}"
                for pool, e in error.items()
            ),
            "`figure-4` `test/chunk/calibration/test_calibration.py`",
            because="there part of the overhead hides behind the transfer",
        ),
        Row(
            "Algorithm 1",
            (
                Claim(
                    "golden-section search from the prior finds the best ratio",
                    exact["as printed"]["wrong"] < 0.05 * search["rooflines"],
                ),
            ),
            f"as printed it misses it in {exact['as printed']['wrong']:,} of {search['rooflines']:,} rooflines "
            f"with an exact prior; `canopy documents calibrate` in {exact['canopy documents calibrate']['wrong']}",
            "`algorithm-1` `python/canopy_chunks/calibration/search.py`",
            because="lines 14 to 20 keep a probe that is no golden point",
        ),
    ]


def code() -> list[Row]:
    lowpass = "`sgl-kernel/python/canopy_kernel/lowpass.py`"
    search = "`python/canopy_chunks/calibration/search.py`"
    return [
        Row(
            "Equation 2, Equation 3, Equation 4, Equation 5, Equation 6",
            shows="FFT along the tokens, the lowest bins kept, norms of what is reconstructed",
            here="as printed, so bin 0, a chunk's mean, counts as low",
            where=f"{lowpass} `python/canopy_chunks/fuse/selectors/frequency.py`",
        ),
        Row(
            "Equation 9, Equation 11",
            shows="a layer takes the slower of recompute and transfer; the crossover r0",
            here="`CostProfile`; no ratio is faster (property test)",
            where=f"{search} `test/chunk/calibration/test_calibration.py`",
        ),
        Row(
            "Equation 12, Equation 13",
            shows="the ratio of least mean TTFT, at least 15 %",
            here="`ServedPrompts.ttft`; the bound is `--floor`",
            where=f"`python/canopy_chunks/calibration/served.py` {search}",
        ),
    ]


def selectors() -> str:
    """Each selector's KL less that of random tokens on the same questions, with standard errors."""
    rows = []
    for arm, label in SELECTORS.items():
        cells = [difference(arm, "random", how) for how in ENCODED]
        speed = arms("MuSiQue")[f"{arm}, bos"]["speedup"]
        rows.append([label, *cells, f"{speed:.1f}"])
    header = ["KL minus that of random tokens", *ENCODED.values(), "times full's speed"]
    return table(header, rows, numbers=True)


def levels() -> str:
    """Return the KL values whose differences are in the table."""
    found = (
        f"{listed((arms(d)[f'random, {how}']['kl'] for d in SETS), '{:.3f}')} {text}"
        for how, text in ENCODED.items()
    )
    return (
        f"{questions()} questions, half of them of each data set. KL of random tokens (MuSiQue and "
        f"HotpotQA): {'; '.join(found)}."
    )


def questions() -> int:
    """Return the number of questions on both data sets."""
    return sum(RESULTS[key]["questions"] for key in SETS.values())


def served() -> str:
    """BOS against the system text, behind which a server encodes."""
    chosen, none = (difference(a, a, other_how="prefix") for a in ("question", "no recompute"))
    return (
        f"KL behind BOS minus KL behind the system text is {chosen} with `question` and {none} with "
        "nothing recomputed."
    )


def pools() -> str:
    rows = [
        [
            name,
            f"{p['r0']:.2f}",
            f"{p['speedup_fixed']:.2f}",
            f"{p['speedup_adaptive']:.2f}",
            f"{p['ratio']:.2f}",
        ]
        for name, p in RESULTS["figure-11"]["pools"].items()
    ]
    return table(
        ["pool", "r0", "fixed 15 %, times full", "searched, times full", "at r"], rows, numbers=True
    )


def short() -> str:
    low, high = (difference(arm, "random") for arm in ("frequency", "high-frequency"))
    most = difference("question", "random")
    return (
        f"The speed of sparse recompute holds. Its choice of tokens does not, in our set-up: on {questions()} "
        f"questions, documents encoded behind BOS, KL to full recompute minus that of random tokens is "
        f"{low} with low frequencies and {high} with high ones, the paper's control; it is "
        f"{most} with `question`."
    )


def all_rows() -> list[Row]:
    return [*figures_2_to_4(), *quality(), *speed(), *code()]


PARTS = {
    "items": lambda: items(all_rows()),
    "short": short,
    "selectors": selectors,
    "levels": levels,
    "served": served,
    "pools": pools,
}
