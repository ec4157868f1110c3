"""Kareto (arXiv 2603.08739): its figures, table, algorithms and observations."""
