"""Figures 4 and 11, Table 2, equations 9 to 13: effect of a cache pool's speed on the best ratio."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from artefact import Context

from cachetune import pictures
from cachetune.pools import Pool, device_bytes, made_up, profile, ttft
from canopy_chunks.calibration.search import golden_section

SIZES = (96, 192, 384)
CHUNKS = 2
RATIOS = (0.0, 0.15, 0.35, 0.6, 1.0)
PAPERS_RATIO = {"as SSD": 0.309, "as HDD": 0.364}
"""Section 5.3.2: the ratios found for the paper's disks. A slow pool's bandwidth is chosen so that
equation 11 gives the same here: a real disk is far too fast for this model on a CPU."""
R_MIN = 0.15


def slow_pools(folder: Path, compute_s: float) -> list[Pool]:
    """Links that take ``r0 / (1 - r0)`` of what recomputing a token takes (equation 11)."""
    return [Pool(n, folder, compute_s * r0 / (1 - r0)) for n, r0 in PAPERS_RATIO.items()]


def figure_4(context: Context) -> dict[str, Any]:
    """TTFT by chunk size and ratio, and equation 10 for the largest size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = {size: made_up(size, CHUNKS) for size in SIZES}
        memory = profile(prompts[SIZES[-1]], Pool("memory"), 1, clock=True)
        pools = [Pool("memory"), slow_pools(folder, memory.compute_s)[1]]
        curves = {
            pool.name: {
                str(ratio): {
                    str(size): round(ttft([prompts[size]], pool, ratio, 1, clock=True), 4)
                    for size in SIZES
                }
                for ratio in RATIOS
            }
            for pool in pools
        }
        model = {pool.name: _equation_10(prompts[SIZES[-1]], pool, curves) for pool in pools}
    pictures.chunk_sizes(context.figure(), curves, SIZES)
    return {
        "chunks": CHUNKS,
        "question_tokens": len(prompts[SIZES[0]]) - prompts[SIZES[0]].reusable,
        "seconds_by_pool_ratio_chunk_size": curves,
        "equation_10": model,
    }


def _equation_10(prompt: Any, pool: Pool, curves: dict[str, Any]) -> dict[str, Any]:
    """Predictions with and without t_o, measurements, and mean relative errors."""
    found, size = profile(prompt, pool, 1, clock=True), str(SIZES[-1])
    rows, errors = {}, {"with t_o": [], "without": []}  # type: ignore[var-annotated]
    for ratio in RATIOS[:-1]:
        measured = curves[pool.name][str(ratio)][size]
        whole = found.ttft(prompt.reusable, ratio)
        without = whole - found.other_s
        rows[str(ratio)] = [round(x, 4) for x in (measured, whole, without)]
        errors["with t_o"].append(abs(whole - measured) / measured)
        errors["without"].append(abs(without - measured) / measured)
    return {
        "t_c_us_a_token": round(1e6 * found.compute_s, 1),
        "t_i_us_a_token": round(1e6 * found.transfer_s, 1),
        "t_o_ms_a_prompt": round(1e3 * found.other_s, 1),
        "r0": round(found.prior(0.0, 1.0), 4),
        "measured_predicted_without_t_o": rows,
        "mean_relative_error": {k: round(sum(v) / len(v), 3) for k, v in errors.items()},
    }


def figure_11(context: Context) -> dict[str, Any]:
    """Full recompute, a fixed 15 % and the searched ratio in every pool; Table 2 is its memory row."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prompts = [made_up(96, 4)]
        compute_s = profile(prompts[0], Pool("memory"), 1, clock=True).compute_s
        pools = [Pool("memory"), Pool("cold disk", folder), *slow_pools(folder, compute_s)]
        rows = {pool.name: _searched(prompts, pool) for pool in pools}
    pictures.pools(context.figure(), rows)
    return {"prompts": len(prompts), "tokens": len(prompts[0]), "pools": rows}


def _searched(prompts: list[Any], pool: Pool) -> dict[str, Any]:
    """Algorithm 1 as ``canopy documents calibrate`` runs it, on prefills that overlap reading and computing."""
    found, before = profile(prompts[0], pool, 1, clock=True), device_bytes()
    search = golden_section(
        lambda r: ttft(prompts, pool, r, 1, clock=True), found.prior(R_MIN, 1.0), R_MIN, 1.0, 0.1
    )
    read = device_bytes() - before
    full, fixed, chosen = (
        ttft(prompts, pool, r, 1, clock=True) for r in (1.0, R_MIN, search.ratio)
    )
    return {
        "t_i_us_a_token": round(1e6 * found.transfer_s, 1),
        "r0": round(found.prior(0.0, 1.0), 4),
        "ratio": round(search.ratio, 4),
        "probes": [[round(r, 4), round(t, 4)] for r, t in search.probes],
        "full_s": round(full, 4),
        "fixed_s": round(fixed, 4),
        "adaptive_s": round(chosen, 4),
        "speedup_fixed": round(full / fixed, 2),
        "speedup_adaptive": round(full / chosen, 2),
        "device_mb_read": round(read / 1e6, 1),
    }
