"""Kareto: how much HBM, DRAM and disk a workload should get (arXiv 2603.08739)."""
