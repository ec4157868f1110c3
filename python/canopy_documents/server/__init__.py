"""Document reuse inside a running SGLang server: the part of the engine that imports SGLang.

``canopy_documents.plugin`` imports it only if document reuse is enabled.
"""
