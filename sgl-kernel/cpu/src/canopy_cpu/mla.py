"""MLA (DeepSeek) on a CPU: attention over the compressed KV itself, by ``torch_native``.

SGLang picks the form of MLA by the name of the attention backend, and for one that it does not
know asks for kernels of the triton backend.
"""

from __future__ import annotations

from typing import Any


def absorb() -> None:
    """Have ``torch_native`` use the absorbed form: queries meet the latent vectors in the cache."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def absorbed(_attention: Any, _batch: Any) -> Any:
        return AttnForwardMethod.MLA

    handlers.AttentionBackendRegistry.register("torch_native", absorbed)
