"""Chunk reuse inside a running SGLang server: the only part of the chunk engine that knows SGLang.

``hooks.HOOKS`` is spliced into ``plugin.SEAMS``. Without ``--canopy-chunks on`` no hook here
changes anything.
"""
