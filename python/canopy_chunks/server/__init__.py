"""Chunk reuse inside a running SGLang server: the only part of the chunk engine that knows SGLang.

``sglang_canopy.server.documents.hooks`` calls it, and only where documents are reused.
"""
