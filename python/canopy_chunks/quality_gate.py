"""The quality gate: reuse is measured on a small built-in task at start, and refused below a floor.

The task is ``EXAMPLES`` prompts of made-up facts in filler documents, with the server's own weights,
tokenizer, selector and ratio: KL and agreement along full recompute's own answer, and the share of
the right answers that stay right. It runs only where the operator set a floor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from canopy_chunks.model import Model
from canopy_chunks.quality import encode_case, holds, measure, refer, tokenise
from canopy_chunks.ratio import Calibrations, Setting
from canopy_chunks.tasks import SYNTHETIC, default_filler, synthetic
from sglang_canopy.errors import CanopyError

logger = logging.getLogger(__name__)

EXAMPLES = 6
TIERS = {"device": "memory", "host": "memory", "disk": "disk"}
"""The store's tiers -> the names calibrations are saved under."""


class Floors(NamedTuple):
    """What the operator demands of reuse; ``None``: nothing. ``--canopy-chunk-max-kl`` and so on."""

    max_kl: float | None = None
    min_top1: float | None = None
    min_kept: float | None = None


def calibrated_ratios(path: str | None, setting: Setting) -> dict[str, float]:
    """Ratios by tier of the store from the file of ``--canopy-chunk-calibration``.

    What was measured through a server with the same backend comes before what the engine gave by
    itself. Raises CanopyError where the file holds none for this model, machine, dtype and split.
    """
    if path is None:
        return {}
    saved = Calibrations(path)
    alone = replace(setting, backend="")
    found = {tier: saved.get(setting, at) or saved.get(alone, at) for tier, at in TIERS.items()}
    ratios = {tier: one.ratio for tier, one in found.items() if one is not None}
    if not ratios:
        raise CanopyError(
            f"--canopy-chunk-calibration {path} {_what_it_has(saved, setting)}, and this server runs "
            f"{setting.dtype}, --tp-size {setting.tp_size}, --attention-backend {setting.backend}, "
            f"on {setting.device}; start it without, run `canopy documents calibrate --url URL --out {path}`, "
            "or give --canopy-chunk-ratio"
            + (
                ""
                if setting.tp_size > 1
                else f" (the engine by itself: `canopy documents calibrate --model DIR --dtype "
                f"{setting.dtype} --out {path}`)"
            )
        )
    logger.info("canopy: calibrated ratios %s", ratios)
    return ratios


def _what_it_has(found: Calibrations, setting: Setting) -> str:
    """Of this model on this chip, in words."""
    known = found.settings(setting.model, setting.device)
    if not known:
        return "has nothing for this model on this machine"
    if known == [None]:
        return "was made by an older version, which kept neither dtype nor --tp-size"
    listed = ", ".join(
        f"{one.dtype} with --tp-size {one.tp_size}" + (f" and {one.backend}" if one.backend else "")
        for one in known
        if one
    )
    return f"has this model in {listed}"


def check_quality(
    model: Model, tokenizer: Any, selector: str, ratio: float, encode: str, floors: Floors
) -> None:
    """Raise CanopyError, with the figures, where reuse is worse than the operator's ``floors``."""
    if floors == Floors():
        return
    if tokenizer is None:
        raise CanopyError("the quality gate needs a tokenizer; drop --skip-tokenizer-init")
    found = measure_quality(model, tokenizer, selector, ratio, encode)
    shown = ", ".join(f"{k} {v:.3g}" if v is not None else f"{k} unknown" for k, v in found.items())
    logger.info("canopy: quality gate at ratio %s: %s", ratio, shown)
    reasons = missed_floors(found, floors)
    if reasons:
        raise CanopyError(
            f"the quality gate refuses chunk reuse at ratio {ratio}: {'; '.join(reasons)}. "
            f"Measured: {shown}. Raise --canopy-chunk-ratio, use another model, or lower the floor"
        )


def measure_quality(
    model: Model, tokenizer: Any, selector: str, ratio: float, encode: str, count: int = EXAMPLES
) -> dict[str, float | None]:
    """``kl`` (nats a token), ``top1``, ``kept`` (of the answers full recompute gets right; None if
    it gets none), means over the built-in examples."""
    rows, right, kept = [], 0, 0
    for example in synthetic(SYNTHETIC, -(-count // len(SYNTHETIC)), default_filler())[:count]:
        case = tokenise(tokenizer, example, 6, 160)
        reference = refer(model, tokenizer, case)
        chunks = encode_case(model, case, encode)
        row = measure(model, tokenizer, case, reference, chunks, selector, ratio, True)
        rows.append(row)
        if holds(reference.text, case.answers):
            right += 1
            kept += holds(row["text"], case.answers)
    return {
        "kl": sum(r["kl"] for r in rows) / len(rows),
        "top1": sum(r["top1"] for r in rows) / len(rows),
        "kept": kept / right if right else None,
    }


def missed_floors(found: Mapping[str, float | None], floors: Floors) -> list[str]:
    """Which floors the figures miss, in words. A figure that could not be measured misses its own."""
    max_kl, min_top1, min_kept = floors
    out = []
    kl, top1, kept = found["kl"], found["top1"], found["kept"]
    if max_kl is not None and (kl is None or kl > max_kl):
        out.append(f"KL {kl:.3g} is above --canopy-chunk-max-kl {max_kl}")
    if min_top1 is not None and (top1 is None or top1 < min_top1):
        out.append(f"{top1:.3g} of the tokens agree, below --canopy-chunk-min-top1 {min_top1}")
    if min_kept is not None and (kept is None or kept < min_kept):
        share = "no answer is right even without reuse" if kept is None else f"{kept:.3g} kept"
        out.append(f"{share}, below --canopy-chunk-min-kept {min_kept}")
    return out
