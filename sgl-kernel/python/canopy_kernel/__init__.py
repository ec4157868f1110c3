"""Kernels of non-prefix KV reuse: each a Triton kernel beside its plain-torch reference.

Pools are paged. A *pool view* is ``[pages, page_size, kv_heads, head_dim]`` whatever the memory
layout; :func:`pages.view` makes it from NHD or HND memory. A *slot* is ``page * page_size +
offset``. Functions choose by where their tensors are: CUDA runs Triton, the CPU runs torch.
"""

__version__ = "0.1.0"
