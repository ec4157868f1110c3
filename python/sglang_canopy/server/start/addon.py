"""Further plugins. A server without a plugin's flag has none of its hooks.

The launching process installs the hooks when its command line has the flag. Its children inherit a
variable, and register the hooks when SGLang loads plugins.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from sglang_canopy import declared
from sglang_canopy.server.start import plugin
from sglang_canopy.server.start.hook import Hook
from sglang_canopy.server.start.self_check import (
    check_complete,
    check_in_place,
    check_signature,
    stop,
)

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs."


class Addon:
    """A further plugin.

    ``flags``: a class of declared options; the first is the flag. ``keep``: checks the parsed
    arguments, stores options on the ``ServerArgs``, and returns whether the server has the feature.
    ``hooks``: imports and returns the other hooks.
    """

    def __init__(
        self,
        name: str,
        flags: type,
        keep: Callable[[Any, Any], bool],
        hooks: Callable[[], tuple[Hook, ...]],
    ) -> None:
        self.name, self.flags, self._keep, self._hooks = name, flags, keep, hooks
        _, option = next(declared.declared_fields(flags))
        self._flag = option.flag or ""
        self.variable = f"CANOPY_INSTALL_{name.upper()}"
        """Environment variable that is set for the children of a server with the feature."""
        self.hooks = (
            Hook(
                _SERVER_ARGS + "add_cli_args",
                "after",
                self.add_flags,
                ("parser",),
                f"add `{self._flag}`",
            ),
            Hook(
                _SERVER_ARGS + "from_cli_args",
                "after",
                self._keep_options,
                ("cls", "args"),
                f"check `{self._flag}`, and install its hooks if it is given",
            ),
        )
        """Hooks on every server with this plugin."""
        self._loaded = False

    def load(self) -> None:
        """Register the flag's hooks, or all in a child of a server with the feature (entry point
        ``sglang.srt.plugins``). Idempotent."""
        if self._loaded:
            return
        self._loaded = True
        plugin.load()  # Canopy's own hooks come first, inside these
        try:
            for hook in (*self.hooks, *(self._hooks() if os.environ.get(self.variable) else ())):
                check_signature(hook)
                hook.register()
        except Exception as error:
            stop(f"could not load canopy_{self.name} ({type(error).__name__}: {error})")

    def load_for_help(self) -> None:
        """Add the flag to ``sglang serve --help`` (entry point ``sglang.srt.platforms``)."""

        def add(result: Any, parser: argparse.ArgumentParser) -> None:
            if "--radix-eviction-policy" in parser._option_string_actions:
                self.add_flags(result, parser)

        plugin.add_to_help(add)

    def add_flags(self, _result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Hook after ``ServerArgs.add_cli_args``."""
        if self._flag not in parser._option_string_actions:
            declared.add_flags(parser.add_argument_group(f"canopy {self.name}"), self.flags)

    def _keep_options(self, server_args: Any, _cls: Any, args: Any, *_: Any, **__: Any) -> None:
        """Hook after ``ServerArgs.from_cli_args``."""
        check_in_place(self.hooks)
        if not self._keep(server_args, args):
            os.environ.pop(self.variable, None)
            return
        os.environ[self.variable] = "1"
        _install(self._hooks(), f"canopy_{self.name}")


def _install(hooks: tuple[Hook, ...], name: str) -> None:
    """Install hooks after SGLang has installed all others. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if not all(hook.is_in_place() for hook in hooks):
        source = HookSource(name, "sglang-canopy")
        targets = defaultdict(list)
        for hook in hooks:
            check_signature(hook)
            targets[hook.target].append((HookType(hook.kind), hook.function, source))
        check_complete()
        for target, functions in targets.items():
            # NOTE: ``apply_hooks`` skips functions that have hooks already.
            HookRegistry._apply_target(target, functions)
    check_in_place(hooks)
