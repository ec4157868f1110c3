"""Chunk reuse inside a running SGLang server: the part of the chunk engine that imports SGLang.

``plugin.py`` is the entry point; it imports the rest only if document reuse is enabled.
"""
