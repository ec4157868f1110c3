"""Kernels for KV reuse beyond the prefix: Triton kernels, each with a plain-torch reference.

Pools are paged. A *pool view* is ``[pages, page_tokens, kv_heads, head_dim]`` for every memory layout;
:func:`pages.view` makes it from NHD or HND memory. A *slot* is ``page * page_tokens + offset``. Functions
run Triton for CUDA tensors and torch for CPU tensors.
"""

__version__ = "0.1.0"
