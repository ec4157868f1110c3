"""Artefacts for `benchmark/papers/run.py --paper wa`."""

from __future__ import annotations

from artefact import Artefact

from wa.ablation import figure_28
from wa.locality import figures_11_to_14, figures_16_to_18, figures_19_20
from wa.predict import figures_15_29
from wa.section3 import figures_4_to_10
from wa.serving import figure_25, figure_26, figure_27
from wa.sizes import figure_21, figure_22

ARTEFACTS: tuple[Artefact, ...] = (
    Artefact("figures-4-10", "Ideal hits, types, users and turns.", figures_4_to_10, 1.0),
    Artefact(
        "figures-11-14", "Next turns by category; reuse times; who reuses.", figures_11_to_14, 1.5
    ),
    Artefact(
        "figures-15-29", "Reuse probability by category: one hour, the next, another day.",
        figures_15_29, 1.5,
    ),
    Artefact("figures-16-18", "Which part of a prompt hits, by type.", figures_16_to_18, 1.0),
    Artefact("figures-19-20", "Lifespans of blocks, by category over time.", figures_19_20, 1.0),
    Artefact("figure-21", "KV of a request as a share of HBM.", figure_21, 0.5),
    Artefact("figure-22", "KV for an ideal hit ratio, in HBM.", figure_22, 0.5),
    Artefact("figure-25", "Hits and queued TTFT by policy and host memory, Qwen2-7B.", figure_25, 2.0),
    Artefact("figure-26", "The same, Llama2-13B.", figure_26, 1.0),
    Artefact("figure-27", "The same, Llama3-70B.", figure_27, 1.0),
    Artefact("figure-28", "GDFS, LRU, the distribution, the life regulator.", figure_28, 3.0),
)  # fmt: skip
