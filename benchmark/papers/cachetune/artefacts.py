"""CacheTune's figures, tables, equations and algorithm that are regenerated here."""

from __future__ import annotations

from functools import partial

from artefact import Artefact

from cachetune import load, quality, search, spectrum, tiers

ARTEFACTS = (
    Artefact(
        "figures-3-7-9-10-musique",
        "attention, closeness against TTFT, the ratio, and low against high frequencies, on MuSiQue",
        partial(quality.run, data="musique"),
        minutes=20,
    ),
    Artefact(
        "figures-3-7-9-10-hotpotqa",
        "the same on HotpotQA",
        partial(quality.run, data="hotpotqa"),
        minutes=20,
    ),
    Artefact(
        "figure-2",
        "the spectrum of K and V, and which tokens equations 2 to 7 choose",
        spectrum.run,
        minutes=1.5,
    ),
    Artefact("figure-4", "TTFT by chunk size and ratio, and equation 10", tiers.figure_4, 1),
    Artefact("figure-8", "TTFT against the request rate", load.run, 1),
    Artefact("figure-11", "a fixed and a searched ratio by cache pool", tiers.figure_11, 1.5),
    Artefact("algorithm-1", "the ratio search, as printed and as built", search.run, 0.1),
)
