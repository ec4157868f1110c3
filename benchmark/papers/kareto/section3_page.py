"""Section 3 of the paper: reuse in the traces, and the effect of sizes and bandwidths."""

from __future__ import annotations

from typing import Any

from result_tables import Claim, Results, Row, change, near, percent

RESULTS = Results("kareto")
TRACES = ("A", "B", "C")


def by_trace(values: dict[str, Any] | list[Any], form: str = "{}") -> str:
    """`1 (A), 2 (B), 3 (C)`"""
    pairs = values.items() if isinstance(values, dict) else zip(TRACES, values, strict=True)
    return ", ".join(f"{form.format(value)} ({name})" for name, value in pairs)


def workloads() -> list[Row]:
    traces = RESULTS["figures-1-2-3-10-11"]
    peak = {t: traces["figure 1"][t]["oracle_share_of_peak"] for t in TRACES}
    skew = {t: traces["figure 2"][t]["blocks_for_90%_of_hits"] for t in TRACES}
    first = {t: 100 * traces["figure 3"][t]["250_to_1000"] for t in TRACES}
    then = {t: 100 * traces["figure 3"][t]["1000_to_2000"] for t in TRACES}
    few = {
        t: traces["figure 10"][t]["for_90%"] / traces["figure 10"][t]["subtrees"] for t in TRACES
    }
    hours = {t: max(traces["figure 11"][t]["ks_first_to_last_hour"]) for t in TRACES}
    subtrees = {t: min(traces["figure 11"][t]["ks_between_subtrees"]) for t in TRACES}
    return [
        Row(
            "Figure 1",
            (
                Claim(
                    "dropping blocks at their last use needs far less room",
                    max(peak.values()) < 0.5,
                ),
            ),
            f"peak {by_trace({t: percent(v) for t, v in peak.items()})} of keeping all",
            "`figures-1-2-3-10-11`",
        ),
        Row(
            "Figure 2",
            (
                Claim("31.95 % of A's blocks give 90 % of the hits", near(skew["A"], 0.3195)),
                Claim("0.67 % of B's", near(skew["B"], 0.0067)),
            ),
            by_trace({t: percent(v, 2) for t, v in skew.items()}),
            "`figures-1-2-3-10-11`",
            because="of the same order",
        ),
        Row(
            "Figure 3",
            (
                Claim("250 to 1,000 GB: +21 points", near(first["A"], 21)),
                Claim(
                    "1,000 to 2,000 GB: under 7, ever less",
                    all(then[t] < min(7, first[t]) for t in TRACES),
                ),
            ),
            f"{by_trace(first, '{:+.1f}')}; then {by_trace(then, '{:+.1f}')}",
            "`figures-1-2-3-10-11`",
            because="A is full sooner here",
        ),
        Row(
            "Figure 10",
            (
                Claim(
                    "few of A's subtrees (under a third) have 90 % of the reuse", few["A"] < 1 / 3
                ),
                Claim("of B's", few["B"] < 1 / 3),
                Claim("of C's", few["C"] < 1 / 3),
            ),
            by_trace({t: percent(v) for t, v in few.items()}),
            "`figures-1-2-3-10-11`",
            because=f"C has {traces['figure 10']['C']['subtrees']}, one an agent",
        ),
        Row(
            "Figure 11",
            (
                Claim(
                    "A's most reused subtrees differ more than its hours",
                    subtrees["A"] > hours["A"],
                ),
                Claim("so on B", subtrees["B"] > hours["B"]),
                Claim("and C", subtrees["C"] > hours["C"]),
            ),
            f"least distance between subtrees {by_trace(subtrees, '{:.2f}')}; greatest between hours "
            f"{by_trace(hours, '{:.2f}')}",
            "`figures-1-2-3-10-11`",
            because="B's subtrees are as alike as its hours, and of C's one pair is",
        ),
    ]


def sizes() -> list[Row]:
    five, six = RESULTS["figure-5"], RESULTS["figure-6"]
    seven, eight = RESULTS["figure-7"], RESULTS["figure-8"]
    one = {t: {r["dram_gib"]: r for r in five[t]["rows"]["1"]} for t in TRACES}
    ttft = {t: one[t][1024.0]["mean_ttft_s"] / one[t][0.0]["mean_ttft_s"] - 1 for t in TRACES}
    speed = {t: one[t][1024.0]["tokens_per_s"] / one[t][0.0]["tokens_per_s"] - 1 for t in TRACES}
    disk = {t: six[t]["observations_2_and_4"] for t in TRACES}
    none = seven["A"]["no_disk"]["mean_ttft_s"]
    coupled = {r["disk_gib"]: r["mean_ttft_s"] for r in seven["A"]["coupled"]}
    least = {t: seven[t]["least_gib_no_worse_than_none"] for t in TRACES}
    hybrid = eight["A"]["1"]
    flat = {t: five[t]["observation_1"]["throughput_range"] for t in TRACES}
    straight = {
        t: five[t]["observation_3"]["straight_until_saturation"]["correlation"] for t in TRACES
    }
    front = {t: eight[t]["1"]["front"]["256 GiB and disk"] for t in TRACES}
    beyond = {t: seven[t]["ttft_falls_beyond_footprint"] for t in TRACES}
    return [
        Row(
            "Figure 5",
            (
                Claim("one instance: DRAM lowers TTFT", max(ttft.values()) < 0),
                Claim("and raises throughput by over 1 %", min(speed.values()) > 0.01),
            ),
            f"none to 1,024 GiB: TTFT {by_trace({t: change(v + 1, 1) for t, v in ttft.items()})}; "
            f"throughput {by_trace({t: change(v + 1, 1) for t, v in speed.items()})}",
            "`figure-5`",
            because="B's reuse fits the device",
        ),
        Row(
            "Figure 6",
            (
                Claim(
                    "the same for a disk",
                    all(d["1"]["ttft_against_none"] < 0 for d in disk.values()),
                ),
            ),
            "3,680 GiB, TTFT "
            + by_trace({t: change(1 + d["1"]["ttft_against_none"], 1) for t, d in disk.items()}),
            "`figure-6`",
        ),
        Row(
            "Figure 7, Observation 5",
            (
                Claim("beyond the footprint a disk still gains", beyond["A"] > 0),
                Claim("a least size is needed (A)", (least["A"] or 0) > min(coupled)),
                Claim("on C too it gains", beyond["C"] > 0),
            ),
            f"A, 256 GiB of DRAM: {none:.1f} s without; "
            + ", ".join(f"{coupled[g]:.1f} s with {g:,.0f} GiB" for g in (58.0, 1840.0, 3680.0)),
            "`figure-7` `test/sim/system/test_system_observations.py`",
            because="on C every disk loses (below)",
        ),
        Row(
            "Figure 8, Observation 6",
            (
                Claim(
                    "256 GB and a disk: far faster than a disk alone",
                    hybrid["least_mean_ttft_s"]["256 GiB and disk"]
                    < 0.5 * hybrid["least_mean_ttft_s"]["disk only"],
                ),
                Claim(
                    "far cheaper than DRAM as good",
                    hybrid["hybrid_usd_per_h"] < 0.9 * hybrid["dram_as_good_usd_per_h"],
                ),
                Claim("both tiers on the front", min(front.values()) > 0),
            ),
            f"A: {hybrid['least_mean_ttft_s']['256 GiB and disk']:.1f} against "
            f"{hybrid['least_mean_ttft_s']['disk only']:.1f} s; "
            f"{hybrid['hybrid_usd_per_h']:.2f} against {hybrid['dram_as_good_usd_per_h']:.2f} USD an "
            f"hour; points of the front with both {by_trace(front)}",
            "`figure-8` `test/sim/system/test_system_observations.py`",
            because="eight GPUs are nine tenths of the cost; B has nothing to win, C's disk loses",
        ),
        bandwidth(),
        Row(
            "Observation 1",
            (Claim("at low density throughput is the rate of arrival", max(flat.values()) < 0.01),),
            f"four instances: moves by {by_trace({t: percent(v, 2) for t, v in flat.items()})}",
            "`figure-5` `test/sim/system/test_system_observations.py`",
        ),
        Row(
            "Observation 2",
            (
                Claim(
                    "at low density a disk wins little",
                    all(abs(d["4"]["ttft_against_none"]) < 0.01 for d in disk.values()),
                ),
            ),
            "four instances, 3,680 GiB: TTFT "
            + by_trace({t: change(1 + d["4"]["ttft_against_none"], 1) for t, d in disk.items()}),
            "`figure-6` `test/sim/system/test_system_observations.py`",
        ),
        Row(
            "Observation 3",
            (
                Claim(
                    "at high density throughput is nearly linear in the cache (over 0.85)",
                    min(straight.values()) > 0.85,
                ),
            ),
            f"correlation up to saturation {by_trace(straight, '{:.2f}')}",
            "`figure-5` `test/sim/system/test_system_observations.py`",
        ),
        Row(
            "Observation 4",
            (
                Claim(
                    "in a queue most of what a disk can hit is hit (A)",
                    disk["A"]["1"]["share"] > 0.5,
                ),
            ),
            f"{percent(disk['A']['1']['share'], 0)} of it",
            "`figure-6` `test/sim/system/test_system_observations.py`",
        ),
    ]


def bandwidth() -> Row:
    rows = {r["gb_per_s"]: r["one_instance_mean_ttft_s"] for r in RESULTS["table-1"]["A"]}
    return Row(
        "Table 1",
        (
            Claim("TTFT collapses at 0.35 GB/s of DRAM", rows[0.35] > 5 * rows[100.0]),
            Claim("and gains little beyond 20", near(rows[20.0], rows[100.0], 0.1)),
        ),
        "one instance, A: "
        + ", ".join(f"{rows[g]:.1f} s at {g:g}" for g in (0.35, 1.0, 20.0, 100.0)),
        "`table-1`",
    )
