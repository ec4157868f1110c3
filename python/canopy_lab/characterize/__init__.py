"""Analyse the reuse in a trace, after Section 3 of arXiv 2506.02634.

One pass (``observe.py``) gathers everything; each other module answers one question from it.
"""
