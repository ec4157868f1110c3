"""Chunk reuse inside a running SGLang server: the part of the chunk engine that imports SGLang.

``sglang_canopy.server.documents.hooks`` calls it, and only if document reuse is enabled.
"""
