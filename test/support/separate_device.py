"""An emulated device: tensors on it raise when the host waits for them.

A tensor of this device reports ``meta`` as its device and keeps its numbers in a CPU tensor that
only operations reach. Every way in which a host waits for a GPU raises :class:`HostSync`: reading
a value (``item``, ``int``, ``bool``, ``tolist``, ``equal``), a shape that depends on values
(``nonzero``, ``unique``, masks as indices), and copies that are not asynchronous. Copies
are counted by direction, in bytes. Pass the result of ``inside`` to kernels that are written for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")
ATEN = torch.ops.aten
WAITS = {
    ATEN._local_scalar_dense, ATEN.nonzero, ATEN.nonzero_static, ATEN.masked_select, ATEN.equal,
    ATEN._unique2, ATEN.unique_consecutive, ATEN.unique_dim, ATEN.is_nonzero, ATEN.item,
}  # fmt: skip
INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}


class HostSync(AssertionError):
    """The host would have waited for the device."""


class There(torch.Tensor):
    """A tensor on the separate device."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> There:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=DEVICE,
        )  # fmt: skip
        tensor.held = held
        return tensor

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory of this device is freed with its last reference."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(None, func, args, kwargs or {})


def inside(x: Any) -> Any:
    """Return the numbers, as a kernel on the device reads them."""
    return x.held if isinstance(x, There) else x


class SeparateDevice(TorchDispatchMode):
    """While entered, ``DEVICE`` works. ``copied`` counts bytes ``to device`` and ``to host``. ``later``
    receives every copy into an existing tensor of the other side: the default runs it at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[str] = Counter()
        self.later: Callable[[Callable[[], Any]], None] = lambda work: work()
        self._factories = _Factories()

    def __enter__(self) -> Any:
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factories.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(self, func, args, kwargs or {})

    def put(self, x: torch.Tensor) -> There:
        """A tensor that was there before: not counted as a copy."""
        return There(x)


class _Factories(TorchFunctionMode):
    """``torch.tensor(list, device=...)`` builds on the host and waits for the copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and _there(kwargs.get("device")):
            raise HostSync("torch.tensor(..., device=) copies from pageable memory and waits")
        return func(*args, **kwargs)


def is_mask(index: torch.Tensor) -> bool:
    """Return whether an index is a mask, whose number of rows must be read on the host."""
    return index.dtype in (torch.bool, torch.uint8)


def _there(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _tensors(values: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda x: found.append(x) if isinstance(x, torch.Tensor) else None, values)
    return found


def _run(mode: SeparateDevice | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    packet, tensors = func.overloadpacket, _tensors((args, kwargs))
    on_the_device = [x for x in tensors if isinstance(x, There)]
    if packet in (ATEN._to_copy, ATEN.copy_):
        return _copy(mode, func, args, kwargs)
    target = kwargs.get("device")
    if on_the_device:
        if packet in WAITS:
            raise HostSync(f"{func} waits for the device")
        if packet in INDEXED:
            for index in _tensors(args[1]):
                if is_mask(index):
                    raise HostSync("a mask as an index: its rows are counted on the host")
                if not isinstance(index, There):
                    raise HostSync("an index on the host is copied, and the copy waited for")
        for x in tensors:
            assert isinstance(x, There) or x.dim() == 0, f"{func}: tensors of two devices"
        if target is not None and not _there(target):
            raise HostSync(f"{func} onto {target}")
    on_device = bool(on_the_device) or _there(target)
    if _there(target):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    out = func(*tree_map(inside, args), **tree_map(inside, kwargs))
    if not on_device:
        return out
    if func._schema.is_mutable and args and isinstance(args[0], There) and out is args[0].held:
        return args[0]
    return tree_map(lambda x: There(x) if isinstance(x, torch.Tensor) else x, out)


def _copy(mode: SeparateDevice | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    source = args[0] if func.overloadpacket is ATEN._to_copy else args[1]
    if func.overloadpacket is ATEN._to_copy:
        named = kwargs.get("device")
        target_there = isinstance(source, There) if named is None else _there(named)
        asynchronous = kwargs.get("non_blocking", False)
    else:
        target_there = isinstance(args[0], There)
        asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if target_there != isinstance(source, There):
        if not asynchronous:
            raise HostSync("a copy between host and device that the host waits for")
        if mode is not None:
            way = "to device" if target_there else "to host"
            mode.copied[way] += source.numel() * source.element_size()
    if func.overloadpacket is ATEN.copy_:
        target, held = inside(args[0]), inside(source)
        if mode is not None and target_there != isinstance(source, There):
            mode.later(lambda: target.copy_(held))
        else:
            target.copy_(held)
        return args[0]
    plain = {k: v for k, v in kwargs.items() if k not in ("device", "non_blocking", "pin_memory")}
    out = func(inside(source), **plain)
    return There(out) if target_there else out
