"""Artefacts of ``benchmark/papers/run.py --paper kareto``."""

from __future__ import annotations

from artefact import Artefact

from kareto.group_ttl import figure_14, figures_15_16
from kareto.search import (
    figure_12,
    figure_12_one_instance,
    figure_12_two_hours,
    figure_13,
    figure_13_by_ttl,
)
from kareto.tiers import figure_5, figure_6, figure_7, figure_8, table_1
from kareto.workload import reuse_in_traces

ARTEFACTS = (
    Artefact("figures-1-2-3-10-11", "what the traces reuse", reuse_in_traces, 1.2),
    Artefact("table-1", "TTFT against the bandwidth of DRAM", table_1, 0.8),
    Artefact("figure-5", "hits, throughput and TTFT against DRAM", figure_5, 1.0),
    Artefact("figure-6", "the same against a disk", figure_6, 1.5),
    Artefact("figure-7", "a disk whose bandwidth grows with it", figure_7, 1.5),
    Artefact("figure-8", "DRAM only, disk only, and both", figure_8, 2.0),
    Artefact("figure-12", "extremes of the front beside fixed DRAM", figure_12, 2.5),
    Artefact("figure-12-two-hours", "the same, two hours of one trace", figure_12_two_hours, 6.0),
    Artefact(
        "figure-12-one-instance", "sizes beside fixed DRAM, two hours", figure_12_one_instance, 3.0
    ),
    Artefact("figure-13", "searches against a grid", figure_13, 3.5),
    Artefact("figure-13-by-ttl", "the same over TTLs", figure_13_by_ttl, 3.5),
    Artefact("figure-14", "hits by group TTLs and by one TTL", figure_14, 2.0),
    Artefact("figures-15-16", "throughput, TTFT and cost by both", figures_15_16, 2.0),
)
