"""Capacity planner: DRAM and disk for a workload (Kareto, arXiv 2603.08739)."""
