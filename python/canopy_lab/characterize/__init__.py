"""Analyse the reuse in a trace, after Section 3 of arXiv 2506.02634.

One pass (``observe.py``) gathers all data. Each other module computes one answer from it.
"""
