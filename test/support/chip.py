"""Mode of kernels under pytest: compiled if there is a chip, else interpreted."""

import dataclasses
from pathlib import Path
from typing import Any

DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Files of an NVIDIA driver on Linux and under Windows. Importing torch takes seconds, so they are
checked first."""


def has_cuda() -> bool:
    """Whether torch finds a CUDA device."""
    if not any(Path(driver).exists() for driver in DRIVERS):
        return False
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def environment(cuda: bool) -> dict[str, str]:
    """The variables of SGLang and Triton that decide it, to be set before either is imported."""
    return {} if cuda else {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1"}


def on_chip(*values: Any) -> Any:
    """Tensors, and dataclasses of them, where kernels run; as they are without a chip."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def move(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return x.to(device)
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
            moved = {n: v.to(device) for n, v in fields.items() if isinstance(v, torch.Tensor)}
            return dataclasses.replace(x, **moved)
        return x

    return tuple(map(move, values))
