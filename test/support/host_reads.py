"""Functions that read values of tensors or copy to a device: on a GPU each is a wait.

Without a device all tensors look alike, so reads of host tensors count as well."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from support.separate_device import INDEXING_OPERATIONS, WAITING_OPERATIONS, is_mask

UNDISPATCHED_READS = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.cpu}
"""Reads that a CPU makes without dispatching an operation."""
CANOPY_PACKAGES, SGLANG_PACKAGE = ("sglang_canopy", "canopy_documents", "canopy_kernel"), "sglang"


class HostReads(TorchDispatchMode):
    """While entered, counts this thread's reads by caller: ``package.module:function``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._undispatched_reads = _UndispatchedReads(self)

    def __enter__(self) -> Any:
        self._undispatched_reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._undispatched_reads.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = func.overloadpacket
        if operation in WAITING_OPERATIONS or (
            operation in INDEXING_OPERATIONS and any(x is not None and is_mask(x) for x in args[1])
        ):
            self.count_read()
        return func(*args, **(kwargs or {}))

    def count_read(self) -> None:
        """Count a read by the innermost function that is SGLang's or ours."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = frame.f_globals.get("__name__", "")
            if module.partition(".")[0] in (*CANOPY_PACKAGES, SGLANG_PACKAGE):
                self.counts[f"{module}:{frame.f_code.co_name}"] += 1
                return
            frame = frame.f_back

    def reads_of(self, *packages: str) -> dict[str, int]:
        """Return the reads of these packages."""
        of_packages = (name for name in self.counts if name.partition(".")[0] in packages)
        return {name: self.counts[name] for name in of_packages}


class _UndispatchedReads(TorchFunctionMode):
    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in UNDISPATCHED_READS or (func is torch.tensor and (kwargs or {}).get("device")):
            self.reads.count_read()  # such a tensor is built on the host, and its copy waited for
        return func(*args, **(kwargs or {}))
