"""Hook on one function of SGLang: registration, and verification that it is in place."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Seam:
    """A hook on one function of SGLang, and the parameters that the function must have."""

    target: str
    kind: str
    """``before``, ``after`` or ``around``."""
    hook: Callable[..., Any]
    parameters: tuple[str, ...]
    """Leading parameters that the original must have."""
    purpose: str = ""
    """Purpose, in one phrase."""

    def register(self) -> None:
        """Register the hook, which SGLang installs when it next applies hooks."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(self.target, self.hook, HookType(self.kind))

    def is_in_place(self) -> bool:
        """Whether the hook is in SGLang's chain of wrappers of the target."""
        function = inspect.getattr_static(*_owner(self.target))
        function = getattr(function, "__func__", function)
        while function is not None:
            cells = getattr(function, "__closure__", None) or ()
            if any(cell.cell_contents is self.hook for cell in cells):
                return True
            function = getattr(function, "__wrapped__", None)
        return False

    def parameters_found(self) -> tuple[str, ...]:
        """Return the parameters of SGLang's function. Raises ImportError or AttributeError."""
        owner, name = _owner(self.target)
        function = getattr(owner, name)
        function = inspect.unwrap(getattr(function, "__func__", function))
        return tuple(inspect.signature(function).parameters)


def _owner(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return pkgutil.resolve_name(path), name
