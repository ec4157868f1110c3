"""Mode of kernels under pytest: compiled if there is a chip, else interpreted."""

import dataclasses
from pathlib import Path
from typing import Any

DRIVER_FILES = ("/dev/nvidiactl", "/dev/dxg")
"""Files of an NVIDIA driver on Linux and under Windows. Importing torch takes seconds, so they are
checked first."""


def has_cuda() -> bool:
    """Whether torch finds a CUDA device."""
    if not any(Path(driver).exists() for driver in DRIVER_FILES):
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def kernel_environment(is_compiled: bool) -> dict[str, str]:
    """Return variables for SGLang and Triton: compile kernels, or interpret them. Set them before either import."""
    return {} if is_compiled else {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}


def move_to_chip(*values: Any) -> Any:
    """Return tensors and dataclasses of tensors, moved to the chip if there is one."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def move(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.to(device)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            moved = {n: v.to(device) for n, v in fields.items() if isinstance(v, torch.Tensor)}
            return dataclasses.replace(value, **moved)
        return value

    return tuple(map(move, values))
