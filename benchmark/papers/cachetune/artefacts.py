"""What of CacheTune's figures, tables, equations and algorithm is regenerated here."""

from __future__ import annotations

from functools import partial

from artefact import Artefact

from cachetune import attention, load, quality, search, spectrum, tiers

ARTEFACTS = (
    Artefact(
        "figures-7-9-10-musique",
        "accuracy against TTFT, the ratio, and low against high frequencies, on MuSiQue",
        partial(quality.run, data="musique"),
        minutes=6,
    ),
    Artefact(
        "figures-7-9-10-hotpotqa",
        "the same on HotpotQA",
        partial(quality.run, data="hotpotqa"),
        minutes=6,
    ),
    Artefact(
        "figures-7-10-tasks",
        "the same on made-up questions that the model can answer",
        partial(quality.run, data="tasks"),
        minutes=2.5,
    ),
    Artefact(
        "figure-2",
        "the spectrum of K and V, and which tokens equations 2 to 7 choose",
        spectrum.run,
        minutes=1.5,
    ),
    Artefact("figure-3", "the question's attention after each kind of recompute", attention.run, 2),
    Artefact("figure-4", "TTFT by chunk size and ratio, and equation 10", tiers.figure_4, 1),
    Artefact("figure-8", "TTFT against the request rate", load.run, 1),
    Artefact("figure-11", "a fixed and a searched ratio by cache pool", tiers.figure_11, 1.5),
    Artefact("algorithm-1", "the ratio search, as printed and as built", search.run, 0.1),
)
