"""Values of page.md, from the result files."""

from __future__ import annotations

from typing import Any

from result_tables import Results, change, percent, signed, table

R = Results("kareto")
TRACES = ("A", "B", "C")

# Section 3: reuse in the traces, and the effect of sizes and bandwidths
_traces = R["figures-1-2-3-10-11"]
peak = {t: _traces["figure 1"][t]["oracle_share_of_peak"] for t in TRACES}
skew = {t: _traces["figure 2"][t]["blocks_for_90%_of_hits"] for t in TRACES}
first = {t: 100 * _traces["figure 3"][t]["250_to_1000"] for t in TRACES}
then = {t: 100 * _traces["figure 3"][t]["1000_to_2000"] for t in TRACES}
ever_less = all(then[t] < min(7, first[t]) for t in TRACES)
subtrees = {t: _traces["figure 10"][t]["subtrees"] for t in TRACES}
few = {t: _traces["figure 10"][t]["for_90%"] / subtrees[t] for t in TRACES}
hours = {t: max(_traces["figure 11"][t]["ks_first_to_last_hour"]) for t in TRACES}
between = {t: min(_traces["figure 11"][t]["ks_between_subtrees"]) for t in TRACES}

_sizes = {t: {r["dram_gib"]: r for r in R["figure-5"][t]["rows"]["1"]} for t in TRACES}
dram_ttft, dram_speed = (
    {t: of[1024.0][key] / of[0.0][key] - 1 for t, of in _sizes.items()}
    for key in ("mean_ttft_s", "tokens_per_s")
)
flat = {t: R["figure-5"][t]["observation_1"]["throughput_range"] for t in TRACES}
straight = {
    t: R["figure-5"][t]["observation_3"]["straight_until_saturation"]["correlation"] for t in TRACES
}
disk = {t: {int(n): d for n, d in R["figure-6"][t]["observations_2_and_4"].items()} for t in TRACES}
disk_ttft = {n: {t: disk[t][n]["ttft_against_none"] for t in TRACES} for n in (1, 4)}
little = all(abs(v) < 0.01 for v in disk_ttft[4].values())

coupled = {int(r["disk_gib"]): r["mean_ttft_s"] for r in R["figure-7"]["A"]["coupled"]}
small_disk = R["figure-7"]["A"]["coupled"][0]
least_size_needed = (R["figure-7"]["A"]["least_gib_no_worse_than_none"] or 0) > min(coupled)
beyond = {t: R["figure-7"][t]["ttft_falls_beyond_footprint"] for t in TRACES}
hybrid = R["figure-8"]["A"]["1"]
_least = hybrid["least_mean_ttft_s"]
far_faster = _least["256 GiB and disk"] < 0.5 * _least["disk only"]
far_cheaper = hybrid["hybrid_usd_per_h"] < 0.9 * hybrid["dram_as_good_usd_per_h"]
front = {t: R["figure-8"][t]["1"]["front"]["256 GiB and disk"] for t in TRACES}
_rates = {r["gb_per_s"]: r["one_instance_mean_ttft_s"] for r in R["table-1"]["A"]}
bandwidth = {f"{rate:g}" if rate % 1 else int(rate): s for rate, s in _rates.items()}
collapses = _rates[0.35] > 5 * _rates[100.0]

# Section 5
_one = R["figure-12-one-instance"]["sizes"]
_changes = [size["against_fixed"] for size in _one.values()] + [
    row["against_fixed"]
    for case in R["figure-12"].values()
    for name, row in case["extremes"].items()
    if name != "fixed"
]
most_speed = max(c["throughput_tokens_per_s"] for c in _changes)
least_ttft, least_cost = (min(c[key] for c in _changes) for key in ("mean_ttft_s", "cost"))
large_disk = _one["1024 + 3600"]["against_fixed"]
_found = {name: case["Algorithm 1"] for name, case in R["figure-13"].items()}
fewer = all(
    s["Algorithm 1"]["evaluations"] < s["grid"]["evaluations"] for s in R["figure-13"].values()
)
of_grid = {name: s["of_grid"] for name, s in _found.items()}
searched = "; ".join(
    f"{name}: {s['evaluations']} of {R['figure-13'][name]['grid']['evaluations']} points, "
    f"{percent(s['of_grid'])}"
    for name, s in _found.items()
)
gains = {t: [row["Algorithm 2"] for row in R["figure-14"][t]] for t in TRACES}
gain_ranges = {t: f"{signed(min(v))} to {signed(max(v))}" for t, v in gains.items()}
gains = {t: min(v) for t, v in gains.items()}
one_ttft, _four_ttft = (
    {t: [row["mean_ttft_s"] for row in R["figures-15-16"][t][name]["gains"]] for t in TRACES}
    for name in ("1 instance, 256 GiB", "4 instances, 256 GiB")
)
lower = max(*one_ttft["B"], *one_ttft["C"]) < 0
hardly_on_a = all(abs(v) < 0.02 for v in one_ttft["A"])
hardly_with_four = all(abs(v) < 0.01 for of in _four_ttft.values() for v in of)

_searched = {f"{name}, size": case for name, case in R["figure-13"].items()} | {
    f"{name}, TTL": case for name, case in R["figure-13-by-ttl"]["cases"].items()
}
unmet = max(
    drawn["unmet"][2] for case in _searched.values() for drawn in case["random points"].values()
)


def searches() -> str:
    """Figure 13, with the same number of random points for each search, and the cost of meeting an SLO."""
    rows = []
    for name, case in _searched.items():
        for way in ("grid", "Algorithm 1", "canopy plan"):
            if way not in case:
                continue
            one = case[way]
            drawn = case["random points"].get(str(one["evaluations"]))
            cells = []
            for key in ("of_grid", "regret"):
                cells += [percent(one[key], 2), percent(drawn[key][0], 2) if drawn else "-"]
            rows.append([f"{name}: {way}", str(one["evaluations"]), *cells])
    heads = ("points", "volume of the grid's", "random", "cost regret", "random")
    return table(["trace, instances, disk's", *heads], rows, numbers=True)


def spread() -> str:
    """The range of nine draws in ten."""
    texts = []
    for name, case in R["figure-13"].items():
        drawn = case["random points"][str(case["Algorithm 1"]["evaluations"])]
        volume, regret = (
            f"{100 * drawn[key][1]:.2f} to {percent(drawn[key][2], 2)}"
            for key in ("of_grid", "regret")
        )
        texts.append(f"{name}: volume {volume}, regret {regret}")
    return "; ".join(texts)


def cheapest() -> str:
    """The cheapest set-up with TTLs in the search, by trace."""
    rows = {
        name: case["extremes"]["cheapest as good as fixed"]
        for name, case in R["figure-13-by-ttl"]["cases"].items()
    }
    return "; ".join(
        f"{name} instance: {row['dram_gib']:,.0f} GiB of DRAM and "
        f"{f'a TTL of {ttl:.0f} s' if (ttl := row.get('ttl_s')) else 'no disk'}, cost {_against(row)[2]}"
        for name, row in rows.items()
    )


def by_ttl() -> str:
    """Two hours of A by the disk's TTL."""
    return "; ".join(
        f"{float(ttl) / 60:.0f} minutes ({row['used_gib']:,.0f} GiB used): mean TTFT {ttft}, cost {cost}"
        for ttl, row in R["figure-13-by-ttl"]["two hours"].items()
        for _, ttft, cost in [_against(row)]
    )


def extremes() -> str:
    """Figure 12: the cheapest set-up as good as the fixed one, and the gain of a disk."""
    two_hours = R["figure-12-two-hours"]
    cases = {**R["figure-12"], **{f"{k} of two hours": two_hours[k] for k in two_hours}}
    rows = [
        [f"{name}: cheapest as good", *_against(case["extremes"]["cheapest as good as fixed"])]
        for name, case in cases.items()
    ]
    rows += [["A, 1 of two hours", *_against(row)] for row in _one.values()]
    head = ["trace, instances", "DRAM an instance + disk, GiB", "mean TTFT", "cost"]
    return table(head, rows, numbers=True)


def _against(row: dict[str, Any]) -> list[str]:
    size = f"{row['dram_gib']:,.0f} + {row.get('disk_gib', 0):,.0f}"
    return [size, *(change(1 + row["against_fixed"][key], 1) for key in ("mean_ttft_s", "cost"))]


def group_ttls() -> str:
    """Figure 14, where tables were also judged on requests that they were not made from."""
    keys = ("Algorithm 2", "canopy", "Algorithm 2, next half", "canopy, next half")
    rows = [
        [
            f"{name}: {case['like_ttl_s']:.0f} s",
            percent(case["one_ttl"]),
            *(signed(case[key]) for key in keys),
        ]
        for name, cases in R["figure-14"].items()
        for case in cases
        if keys[-1] in case
    ]
    return table(["at the bytes of one TTL of", "which hits", *keys], rows, numbers=True)
