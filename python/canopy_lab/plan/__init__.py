"""The planner: how much DRAM and disk a workload should get (Kareto, arXiv 2603.08739)."""
