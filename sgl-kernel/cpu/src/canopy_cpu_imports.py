"""Make `import sglang` and `import torchvision` work on a CPU build of torch.

A .pth file imports this module in every interpreter of an environment that serves on a CPU,
including the spawned scheduler and detokenizer, because both imports happen there before any SGLang
plugin is loaded. Start-up costs one entry on `sys.meta_path`: nothing is imported, and nothing else
happens, until `sglang` or `torchvision` is imported.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import MetaPathFinder

SGLANG_DEFAULTS = {
    # Without it `is_cpu()` is False everywhere and the rotary embedding imports vllm.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Idle OpenMP threads that spin slow down every other process on the machine (gathers by 40
    # times).
    "OMP_WAIT_POLICY": "PASSIVE",
}

_libraries: list[object] = []  # a torch.library.Library undoes its definitions when it is collected


def _set_sglang_defaults() -> None:
    """Set the environment variables of `SGLANG_DEFAULTS` that are unset."""
    for name, value in SGLANG_DEFAULTS.items():
        os.environ.setdefault(name, value)


def _declare_torchvision_operators() -> None:
    """Declare the schemas that torchvision registers Python kernels for.

    The wheel on PyPI is linked against CUDA, so its extension does not load on a CPU build of
    torch, and `torchvision/_meta_registrations.py` fails on missing operators. If torch has CUDA,
    the extension loads and a second declaration would fail.
    """
    import torch

    if torch.version.cuda is not None:
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


class _PrepareOnImport(MetaPathFinder):
    """Runs a preparation once, just before its package is first imported; finds no modules."""

    def __init__(self) -> None:
        self._prepare_by_package = {
            "sglang": _set_sglang_defaults,
            "torchvision": _declare_torchvision_operators,
        }

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        prepare = self._prepare_by_package.pop(fullname, None)
        if prepare is not None:
            prepare()
        return


sys.meta_path.insert(0, _PrepareOnImport())
