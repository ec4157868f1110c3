"""Hook on one function of SGLang: registration, and verification that it is in place."""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_canopy import releases


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook on one function of SGLang, and the parameters that the function must have."""

    target: str
    kind: str
    """``before``, ``after`` or ``around``."""
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    """Leading parameters that the original must have."""
    purpose: str = ""
    fallback: str = ""
    """What a server does if the function is missing or differs; empty if it does not start."""
    is_on_first_request: bool = False
    """Whether each scheduler's first request passes it."""

    def register(self) -> None:
        """Register the hook, which SGLang installs when it next applies hooks."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        if self.target in releases.SWITCHED_OFF:
            return
        hook = self.function
        if self.is_on_first_request:
            hook = self._record_first_call()
        HookRegistry.register(self.target, hook, HookType(self.kind))

    def _record_first_call(self) -> Callable[..., Any]:
        """Count the hook as uncalled until SGLang calls it; return the function to install."""
        releases.UNCALLED_HOOKS.add(self.target)

        @functools.wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            releases.UNCALLED_HOOKS.discard(self.target)
            return self.function(*args, **kwargs)

        return call

    def is_in_place(self) -> bool:
        """Return whether the hook is in SGLang's chain of wrappers of the target, unless it is off."""
        if self.target in releases.SWITCHED_OFF:
            return True
        function = inspect.getattr_static(*_find_owner(self.target))
        function = getattr(function, "__func__", function)
        while function is not None:
            for cell in getattr(function, "__closure__", None) or ():
                wrapped = cell.cell_contents
                if self.function in (wrapped, getattr(wrapped, "__wrapped__", None)):
                    return True
            function = getattr(function, "__wrapped__", None)
        return False

    def sglang_parameters(self) -> tuple[str, ...]:
        """Return the parameters of SGLang's function. Raises ImportError or AttributeError."""
        owner, name = _find_owner(self.target)
        function = getattr(owner, name)
        function = inspect.unwrap(getattr(function, "__func__", function))
        return tuple(inspect.signature(function).parameters)


def _find_owner(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return pkgutil.resolve_name(path), name
