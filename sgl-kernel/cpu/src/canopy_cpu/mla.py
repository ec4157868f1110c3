"""MLA (DeepSeek) on a CPU: attention over the compressed KV itself, by ``torch_native``.

SGLang selects the form of MLA by the name of the attention backend. For an unknown name it calls
kernels of the Triton backend.
"""

from __future__ import annotations

from typing import Any


def register_absorbed_form() -> None:
    """Make ``torch_native`` use the absorbed form: queries attend to the cached latent vectors."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    def select_absorbed_form(_attention: Any, _batch: Any) -> Any:
        return AttnForwardMethod.MLA

    handlers.AttentionBackendRegistry.register("torch_native", select_absorbed_form)
