"""An emulated device: its tensors raise when the host waits for them.

A tensor of this device reports ``meta`` as its device and keeps its numbers in a CPU tensor that
only operations reach. Every way in which a host waits for a GPU raises :class:`HostSync`: reading
a value (``item``, ``int``, ``bool``, ``tolist``, ``equal``), a shape that depends on values
(``nonzero``, ``unique``, masks as indices), and copies that are not asynchronous. Copies
are counted by direction, in bytes. Pass the result of ``unwrap`` to kernels that are written for a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

DEVICE = torch.device("meta")
ATEN = torch.ops.aten
WAITING_OPERATIONS = {
    ATEN._local_scalar_dense, ATEN.nonzero, ATEN.nonzero_static, ATEN.masked_select, ATEN.equal,
    ATEN._unique2, ATEN.unique_consecutive, ATEN.unique_dim, ATEN.is_nonzero, ATEN.item,
}  # fmt: skip
INDEXING_OPERATIONS = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}


class HostSync(AssertionError):
    """The host would have waited for the device."""


class DeviceTensor(torch.Tensor):
    """A tensor on the separate device."""

    numbers: torch.Tensor

    @staticmethod
    def __new__(cls, numbers: torch.Tensor) -> DeviceTensor:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, numbers.size(), strides=numbers.stride(), storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype, device=DEVICE,
        )  # fmt: skip
        tensor.numbers = numbers
        return tensor

    def record_stream(self, stream: Any) -> None:
        """Do nothing: memory of this device is freed with its last reference."""

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(None, func, args, kwargs or {})


def unwrap(value: Any) -> Any:
    """Return the numbers of a device tensor, as a kernel reads them; any other value as it is."""
    return value.numbers if isinstance(value, DeviceTensor) else value


class SeparateDevice(TorchDispatchMode):
    """While entered, ``DEVICE`` works. ``copied_bytes`` counts ``to device`` and ``to host``. ``schedule_copy``
    receives every copy into an existing tensor of the other side; by default it runs at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copied_bytes: Counter[str] = Counter()
        self.schedule_copy: Callable[[Callable[[], Any]], None] = lambda copy: copy()
        self._factories = _TensorFactories()

    def __enter__(self) -> Any:
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factories.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(self, func, args, kwargs or {})

    def put(self, numbers: torch.Tensor) -> DeviceTensor:
        """Return a tensor on the device, not counted as a copy."""
        return DeviceTensor(numbers)


class _TensorFactories(TorchFunctionMode):
    """Raises ``HostSync`` for ``torch.tensor(list, device=...)``, which waits for its copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and _is_device(kwargs.get("device")):
            raise HostSync("torch.tensor(..., device=) copies from pageable memory and waits")
        return func(*args, **kwargs)


def is_mask(index: torch.Tensor) -> bool:
    """Return whether an index is a mask, whose number of rows must be read on the host."""
    return index.dtype in (torch.bool, torch.uint8)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _tensors(values: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    tree_map_only(torch.Tensor, tensors.append, values)
    return tensors


def _run(mode: SeparateDevice | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    operation, tensors = func.overloadpacket, _tensors((args, kwargs))
    device_tensors = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    if operation in (ATEN._to_copy, ATEN.copy_):
        return _copy(mode, func, args, kwargs)
    device = kwargs.get("device")
    if device_tensors:
        if operation in WAITING_OPERATIONS:
            raise HostSync(f"{func} waits for the device")
        if operation in INDEXING_OPERATIONS:
            for index in _tensors(args[1]):
                if is_mask(index):
                    raise HostSync("a mask as an index: its rows are counted on the host")
                if not isinstance(index, DeviceTensor):
                    raise HostSync("an index on the host is copied, and the copy waited for")
        on_host = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        assert all(tensor.dim() == 0 for tensor in on_host), f"{func}: tensors of two devices"
        if device is not None and not _is_device(device):
            raise HostSync(f"{func} onto {device}")
    is_on_device = bool(device_tensors) or _is_device(device)
    if _is_device(device):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    result = func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    if not is_on_device:
        return result
    target = args[0] if args else None
    if func._schema.is_mutable and isinstance(target, DeviceTensor) and result is target.numbers:
        return target
    return tree_map_only(torch.Tensor, DeviceTensor, result)


def _copy(mode: SeparateDevice | None, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    source = args[0] if func.overloadpacket is ATEN._to_copy else args[1]
    if func.overloadpacket is ATEN._to_copy:
        device = kwargs.get("device")
        is_to_device = isinstance(source, DeviceTensor) if device is None else _is_device(device)
        is_asynchronous = kwargs.get("non_blocking", False)
    else:
        is_to_device = isinstance(args[0], DeviceTensor)
        is_asynchronous = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    if is_to_device != isinstance(source, DeviceTensor):
        if not is_asynchronous:
            raise HostSync("a copy between host and device that the host waits for")
        if mode is not None:
            direction = "to device" if is_to_device else "to host"
            mode.copied_bytes[direction] += source.numel() * source.element_size()
    if func.overloadpacket is ATEN.copy_:
        target, numbers = unwrap(args[0]), unwrap(source)
        if mode is not None and is_to_device != isinstance(source, DeviceTensor):
            mode.schedule_copy(lambda: target.copy_(numbers))
        else:
            target.copy_(numbers)
        return args[0]
    placement = ("device", "non_blocking", "pin_memory")
    options = {name: value for name, value in kwargs.items() if name not in placement}
    copied = func(unwrap(source), **options)
    return DeviceTensor(copied) if is_to_device else copied
