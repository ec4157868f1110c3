"""Further plugins. Without its flag, a plugin has only the hooks that add and check the flag.

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

    ``flags``: a class of declared options; the first is the flag. ``accept_options``:
    checks the parsed arguments, stores options on the ``ServerArgs``, and returns whether the server has
    the feature. ``load_feature_hooks``: imports and returns the other hooks.
    """

    def __init__(
        self,
        name: str,
        flags: type,
        accept_options: Callable[[Any, Any], bool],
        load_feature_hooks: Callable[[], tuple[Hook, ...]],
    ) -> None:
        self.name, self.flags = name, flags
        self._accept_options, self._load_feature_hooks = accept_options, load_feature_hooks
        _, option = next(declared.declared_fields(flags))
        self._flag = option.flag or ""
        self.variable = f"CANOPY_INSTALL_{name.upper()}"
        """Environment variable that is set for the children of a server with the feature."""
        self.flag_hooks = (
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
                self._install_if_on,
                ("cls", "args"),
                f"check `{self._flag}`, and install its hooks if it is given",
            ),
        )
        """Hooks on every server with this plugin."""
        self._is_loaded = False

    def load(self) -> None:
        """Register the flag's hooks, or all in a child of a server with the feature (entry point
        ``sglang.srt.plugins``). Idempotent."""
        if self._is_loaded:
            return
        self._is_loaded = True
        plugin.load()  # Canopy's own hooks come first, inside these
        try:
            is_on = os.environ.get(self.variable)
            feature_hooks = self._load_feature_hooks() if is_on else ()
            for hook in (*self.flag_hooks, *feature_hooks):
                check_signature(hook)
                hook.register()
        except Exception as error:
            stop(f"could not load canopy_{self.name} ({type(error).__name__}: {error})")

    def load_for_help(self) -> None:
        """Add the flag to ``sglang serve --help`` (entry point ``sglang.srt.platforms``)."""

        def add_to_server(result: Any, parser: argparse.ArgumentParser) -> None:
            if "--radix-eviction-policy" in parser._option_string_actions:
                self.add_flags(result, parser)

        plugin.add_to_help(add_to_server)

    def add_flags(self, _result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Hook after ``ServerArgs.add_cli_args``."""
        if self._flag not in parser._option_string_actions:
            declared.add_flags(parser.add_argument_group(f"canopy {self.name}"), self.flags)

    def _install_if_on(self, server_args: Any, _cls: Any, args: Any, *_: Any, **__: Any) -> None:
        """Hook after ``ServerArgs.from_cli_args``."""
        check_in_place(self.flag_hooks)
        if not self._accept_options(server_args, args):
            os.environ.pop(self.variable, None)
            return
        os.environ[self.variable] = "1"
        _install_hooks(self._load_feature_hooks(), f"canopy_{self.name}")


def _install_hooks(hooks: tuple[Hook, ...], name: str) -> None:
    """Install hooks after SGLang has installed all others. Idempotent."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if not all(hook.is_in_place() for hook in hooks):
        source = HookSource(name, "sglang-canopy")
        functions_by_target = defaultdict(list)
        for hook in hooks:
            check_signature(hook)
            functions_by_target[hook.target].append((HookType(hook.kind), hook.function, source))
        check_complete()
        for target, functions in functions_by_target.items():
            # NOTE: ``apply_hooks`` skips functions that have hooks already.
            HookRegistry._apply_target(target, functions)
    check_in_place(hooks)
