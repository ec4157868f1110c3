"""What a trace's reuse looks like: Section 3 of arXiv 2506.02634, for anybody's trace.

One pass (``observe.py``) gathers everything; each other module answers one question from it.
"""
