"""One function of SGLang that Canopy hooks: how it is registered, and how to tell that it is."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_canopy.thread_time import timed

_SRT = "sglang.srt."
_SCHEDULERS = ("managers.schedule", "mem_cache.unified_radix_cache.", "mem_cache.common.")
"""What of SGLang runs in the scheduler's thread. A forward is computing, ours or not."""


@dataclass(frozen=True, slots=True)
class Seam:
    """A hook on one function of SGLang, and the parameters that the function must have."""

    target: str
    kind: str
    """``before``, ``after`` or ``around``."""
    hook: Callable[..., Any]
    parameters: tuple[str, ...]
    """Leading parameters of the original, as this release of Canopy was written against."""
    purpose: str = ""
    """What it is for, in one phrase."""

    def register(self) -> None:
        """Have SGLang put the hook around its function when it next applies hooks."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(self.target, self.registered, HookType(self.kind))

    @property
    def registered(self) -> Callable[..., Any]:
        """The hook as SGLang calls it: with its time counted where it runs in the scheduler's
        thread, over and over."""
        name = self.target.removeprefix(_SRT)
        if not name.startswith(_SCHEDULERS) or name.endswith(".__init__"):
            return self.hook
        return timed(name.removeprefix("managers."), self.hook, self.kind == "around")

    def is_in_place(self) -> bool:
        """Whether the hook is on the chain of wrappers that SGLang put around the target."""
        function = inspect.getattr_static(*_owner(self.target))
        function = getattr(function, "__func__", function)
        while function is not None:
            cells = getattr(function, "__closure__", None) or ()
            if any(cell.cell_contents is self.registered for cell in cells):
                return True
            function = getattr(function, "__wrapped__", None)
        return False

    def parameters_found(self) -> tuple[str, ...]:
        """The parameters of SGLang's own function. Raises ImportError or AttributeError."""
        owner, name = _owner(self.target)
        function = getattr(owner, name)
        function = inspect.unwrap(getattr(function, "__func__", function))
        return tuple(inspect.signature(function).parameters)


def _owner(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return pkgutil.resolve_name(path), name
