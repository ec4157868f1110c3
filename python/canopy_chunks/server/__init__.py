"""Chunk reuse inside a running SGLang server: the only part of the chunk engine that knows SGLang.

``hooks.HOOKS`` is spliced into ``server/seams.py``. Without ``--canopy-chunks on`` no hook here
changes anything.
"""
