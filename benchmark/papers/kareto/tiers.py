"""Table 1, Figures 5 to 8 and the six observations: DRAM and disk against load, simulated."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from artefact import Context
from matplotlib.ticker import ScalarFormatter

from canopy_lab.plan.objective import Objectives
from kareto.setting import (
    INSTANCES,
    NAMES,
    TRACES,
    configuration,
    facts,
    inputs,
    run,
    short,
    slope_share,
)

BANDWIDTHS = (0.35e9, 1e9, 5e9, 20e9, 40e9, 60e9, 100e9)
DRAM = (0.0, 128.0, 256.0, 384.0, 512.0, 768.0, 1024.0, 2048.0)
DISK = (0.0, 230.0, 460.0, 920.0, 1840.0, 3680.0)


def table_1(context: Context) -> Any:
    """TTFT against the bandwidth between DRAM and device."""
    found = {}
    for name in TRACES:
        work = inputs(name, context.data)
        found[name] = [
            {
                "gb_per_s": b / 1e9,
                **short(run(work, configuration(4, 1024.0), host_bytes_per_s=b)),
                "one_instance_mean_ttft_s": round(
                    run(work, configuration(1, 1024.0), host_bytes_per_s=b)["mean_ttft_s"], 3
                ),
            }
            for b in BANDWIDTHS
        ]
    return found


def figure_5(context: Context) -> Any:
    """Hits, throughput and mean TTFT against DRAM; observations 1 and 3."""
    found: dict[str, Any] = {}
    for name in TRACES:
        work = inputs(name, context.data)
        rows = {
            str(n): [short(run(work, configuration(n, dram))) for dram in DRAM] for n in INSTANCES
        }
        about = facts(work)
        high, low = rows["1"], rows["4"]
        speed = [r["tokens_per_s"] for r in low]
        found[name] = {
            **about,
            "rows": rows,
            "observation_1": {
                "throughput_range": round(max(speed) / min(speed) - 1, 4),
                "throughput_of_offered": round(max(speed) / about["offered_tokens_per_s"], 4),
                "ttft_first_half_of_gain": _half_of_gain(low),
            },
            "observation_3": {
                "throughput_gain": round(high[-1]["tokens_per_s"] / high[0]["tokens_per_s"] - 1, 4),
                "ttft_factor": round(high[0]["mean_ttft_s"] / high[-1]["mean_ttft_s"], 2),
                "straight_until_saturation": _straight(high, about["offered_tokens_per_s"]),
                "straight_in_hits": slope_share(
                    [r["hits"] for r in high], [r["tokens_per_s"] for r in high]
                ),
            },
        }
    _draw(found, "dram_gib", "DRAM of an instance, GiB", context)
    return found


def _half_of_gain(rows: list[dict[str, Any]]) -> float | None:
    """Return the least DRAM (GiB) with half of the largest gain in mean TTFT."""
    first, last = rows[0]["mean_ttft_s"], rows[-1]["mean_ttft_s"]
    if first <= last:
        return None
    return next(r["dram_gib"] for r in rows if first - r["mean_ttft_s"] >= (first - last) / 2)


def _straight(rows: list[dict[str, Any]], offered: float) -> dict[str, Any]:
    """Return the linearity of throughput in DRAM, up to the size with gains under 1 % beyond it."""
    best = max(r["tokens_per_s"] for r in rows)
    end = next(i for i, r in enumerate(rows) if r["tokens_per_s"] >= 0.99 * best) + 1
    used = rows[: max(end, 3)]
    return {
        "up_to_gib": used[-1]["dram_gib"],
        "correlation": slope_share(
            [r["dram_gib"] for r in used], [r["tokens_per_s"] for r in used]
        ),
        "of_offered": round(best / offered, 3),
    }


def figure_6(context: Context) -> Any:
    """The same against a disk's capacity; observations 2 and 4."""
    found: dict[str, Any] = {}
    for name in TRACES:
        work = inputs(name, context.data)
        rows: dict[str, Any] = {}
        timely: dict[str, Any] = {}
        for n in INSTANCES:
            rows[str(n)] = [short(run(work, configuration(n, 0.0, disk))) for disk in DISK]
            # Hits of the capacity if every read ended before its request begins.
            ideal = run(
                work, configuration(n, 0.0, DISK[-1], disk="ideal"), prefetch_policy="wait_complete"
            )
            waits = run(work, configuration(n, 0.0, DISK[-1]), prefetch_policy="timeout")
            most = rows[str(n)][-1]
            possible = ideal["token_hit_ratio"] - rows[str(n)][0]["hits"]
            won = most["hits"] - rows[str(n)][0]["hits"]
            timely[str(n)] = {
                "queue_s": most["queue_s"],
                "hits_won": round(won, 4),
                "hits_possible": round(possible, 4),
                "share": round(won / possible, 3) if possible > 1e-3 else None,
                "ttft_against_none": round(
                    most["mean_ttft_s"] / rows[str(n)][0]["mean_ttft_s"] - 1, 4
                ),
                "timeout_hits_won": round(waits["token_hit_ratio"] - rows[str(n)][0]["hits"], 4),
                "timeout_ttft_against_none": round(
                    waits["mean_ttft_s"] / rows[str(n)][0]["mean_ttft_s"] - 1, 4
                ),
            }
        found[name] = {"rows": rows, "observations_2_and_4": timely}
    _draw(found, "disk_gib", "disk, GiB (bandwidth grows with it)", context)
    return found


def figure_7(context: Context) -> Any:
    """Disk capacity with the bandwidth it brings, and at a fixed bandwidth; observation 5."""
    found: dict[str, Any] = {}
    sizes = (58.0, *DISK[1:])
    figure, panels = plt.subplots(1, 3, figsize=(11.5, 3.4), layout="constrained")
    for panel, name in zip(panels, TRACES):
        work = inputs(name, context.data)
        coupled = [short(run(work, configuration(1, 256.0, s))) for s in sizes]
        apart = [short(run(work, configuration(1, 256.0, s, disk="ideal"))) for s in sizes]
        none = short(run(work, configuration(1, 256.0)))
        about = work.trace.distinct_blocks * work.trace[0].block_tokens
        kv_gib = about * work.engine.profile.kv_bytes_per_token / 2**30
        beyond = [r for r in coupled if r["disk_gib"] >= kv_gib]
        found[name] = {
            "distinct_kv_gib": round(kv_gib, 1),
            "no_disk": none,
            "coupled": coupled,
            "unlimited_bandwidth": apart,
            "ttft_falls_beyond_footprint": round(
                1 - beyond[-1]["mean_ttft_s"] / beyond[0]["mean_ttft_s"], 4
            )
            if len(beyond) > 1
            else None,
            "least_gib_no_worse_than_none": next(
                (r["disk_gib"] for r in coupled if r["mean_ttft_s"] <= none["mean_ttft_s"]), None
            ),
        }
        panel.plot(sizes, [r["mean_ttft_s"] for r in coupled], "o-", label="bandwidth with size")
        panel.plot(sizes, [r["mean_ttft_s"] for r in apart], "s--", label="unlimited bandwidth")
        panel.axhline(none["mean_ttft_s"], color="grey", ls=":", label="no disk")
        panel.axvline(kv_gib, color="k", lw=0.8, ls="-.", label="distinct KV")
        panel.set_xscale("log")
        panel.set_xlabel("disk, GiB")
        panel.set_title(NAMES[name], fontsize=10)
        panel.grid(alpha=0.25)
        panel.set_ylim(0, None)
    panels[0].set_ylabel("mean TTFT, s")
    _legend(figure, panels[0], 4)
    figure.savefig(context.figure(), dpi=100)
    plt.close(figure)
    return found


def figure_8(context: Context) -> Any:
    """DRAM only, disk only and both; observation 6."""
    objectives = Objectives.of(("mean_ttft", "throughput", "cost"))
    found: dict[str, Any] = {}
    figure, panels = plt.subplots(2, 3, figsize=(11.5, 6.2), layout="constrained")
    for column, name in enumerate(TRACES):
        work = inputs(name, context.data)
        found[name] = {}
        for line, n in enumerate(INSTANCES):
            kinds = {
                "DRAM only": [configuration(n, d) for d in (0, 256, 512, 1024, 2048)],
                "disk only": [configuration(n, 0, s) for s in DISK[2:]],
                "256 GiB and disk": [configuration(n, 256, s) for s in DISK[2:]],
            }
            rows = {kind: [run(work, c) for c in listed] for kind, listed in kinds.items()}
            every = [(kind, row) for kind, listed in rows.items() for row in listed]
            front = [every[i][0] for i in objectives.front([row for _, row in every])]
            best = {kind: min(r["mean_ttft_s"] for r in listed) for kind, listed in rows.items()}
            hybrid = min(rows["256 GiB and disk"], key=lambda r: r["mean_ttft_s"])
            as_good = [
                r for r in rows["DRAM only"] if r["mean_ttft_s"] <= hybrid["mean_ttft_s"] * 1.001
            ]
            found[name][str(n)] = {
                "rows": {kind: [short(r) for r in listed] for kind, listed in rows.items()},
                "front": {kind: front.count(kind) for kind in rows},
                "least_mean_ttft_s": {kind: round(t, 4) for kind, t in best.items()},
                "hybrid_against_256_gib": round(
                    hybrid["mean_ttft_s"] / rows["DRAM only"][1]["mean_ttft_s"] - 1, 4
                ),
                "hybrid_usd_per_h": round(hybrid["cost_per_hour"], 3),
                "dram_as_good_usd_per_h": round(min(r["cost_per_hour"] for r in as_good), 3)
                if as_good
                else None,
            }
            panel = panels[line][column]
            for (kind, listed), mark in zip(rows.items(), "osD"):
                panel.plot(
                    [r["cost_per_hour"] for r in listed],
                    [r["mean_ttft_s"] for r in listed],
                    mark + "-",
                    label=kind,
                    ms=4,
                )
            panel.set_title(f"{NAMES[name]}, {n} instance{'s' * (n > 1)}", fontsize=10)
            panel.set_xlabel("USD an hour")
            panel.set_ylim(0, 1.08 * max(r["mean_ttft_s"] for _, r in every))
            panel.grid(alpha=0.25)
    for line in panels:
        line[0].set_ylabel("mean TTFT, s")
    _legend(figure, panels[0][0], 3)
    figure.savefig(context.figure(), dpi=90)
    plt.close(figure)
    return found


def _draw(found: dict[str, Any], key: str, label: str, context: Context) -> None:
    figure, panels = plt.subplots(3, 3, figsize=(10.5, 8), layout="constrained", sharex=True)
    shown = (("hits", "token hit ratio", 1), ("tokens_per_s", "1,000 tokens/s", 1e-3))
    for column, name in enumerate(TRACES):
        for n, listed in found[name]["rows"].items():
            x = [r[key] for r in listed]
            style = {"marker": "o", "ms": 4, "label": f"{n} instance{'s' * (n != '1')}"}
            for line, (metric, _, scale) in enumerate(shown):
                panels[line][column].plot(x, [r[metric] * scale for r in listed], **style)
            panels[2][column].plot(x, [r["mean_ttft_s"] for r in listed], **style)
        panels[0][column].set_title(NAMES[name], fontsize=10)
        panels[2][column].set_yscale("log")
        panels[2][column].set_xlabel(label)
        panels[2][column].set_xscale("symlog", linthresh=128)
        panels[2][column].set_xticks([0, *[r for r in x if r][::2]])
        panels[2][column].xaxis.set_major_formatter(ScalarFormatter())
        panels[2][column].tick_params(axis="x", labelsize=8)
    for line in panels:
        for panel in line:
            panel.grid(alpha=0.25)
    panels[0][0].set_ylabel(shown[0][1])
    panels[1][0].set_ylabel(shown[1][1])
    panels[2][0].set_ylabel("mean TTFT, s")
    _legend(figure, panels[0][0], 2)
    figure.savefig(context.figure(), dpi=90)
    plt.close(figure)


def _legend(figure: Any, panel: Any, columns: int) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
