"""Models of the paper on the GPUs of one instance (section 3.5)."""

from __future__ import annotations

from dataclasses import dataclass

from canopy_lab.sim.model import PRESETS, ModelShape

GPU_BYTES = 80e9
ACTIVATION_BYTES = 4e9
"""Per GPU. With it, 973 tokens of Qwen2-7B are 0.09 % of the memory for KV, as in the paper."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on the GPUs of one instance."""

    shape: ModelShape
    weight_bytes: float
    gpus: int

    @property
    def kv_capacity_bytes(self) -> float:
        """Left for KV."""
        return self.gpus * (GPU_BYTES - ACTIVATION_BYTES) - self.weight_bytes

    @property
    def kv_capacity_tokens(self) -> int:
        return int(self.kv_capacity_bytes / self.shape.kv_bytes_per_token())


MODELS = {
    "Qwen2-7B": ServedModel(PRESETS["qwen2.5-7b"], 15.2e9, 1),
    "Llama2-13B": ServedModel(ModelShape(40, 5120, 40, 40, 128, 13824), 26.0e9, 1),
    "Llama3-70B": ServedModel(PRESETS["llama-3.1-70b"], 141e9, 4),
}
"""GQA, MHA, GQA."""
