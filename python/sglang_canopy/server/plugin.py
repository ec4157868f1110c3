"""The one place that touches SGLang's start-up.

SGLang runs ``load`` in every process that serves (entry point ``sglang.srt.plugins``). It
registers the hooks in ``SEAMS``; ``self_check`` then proves that each is in place. SGLang
logs and swallows a plugin's exceptions and a failed hook, and would run silently without the
feature; so whatever fails here ends the process with the reason and the fix.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from sglang_canopy import SGLANG_VERSION
from sglang_canopy.bench import forced_output
from sglang_canopy.chunk.server import hooks as chunk_hooks
from sglang_canopy.config.tiers import arguments_of_plan
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names
from sglang_canopy.request import client_hints
from sglang_canopy.server import digests, entry
from sglang_canopy.server.refusals import unsupported
from sglang_canopy.storage import weights

_SRT = "sglang.srt."


@dataclass(frozen=True, slots=True)
class Seam:
    """One function of SGLang that Canopy hooks, and the parameters it must have."""

    target: str
    kind: str
    """``before``, ``after`` or ``around``."""
    hook: Callable[..., Any]
    parameters: tuple[str, ...]
    """Leading parameters of the original, as this release of Canopy was written against."""


def _add_flags(_result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
    options = {name: action for action in parser._actions for name in action.option_strings}
    policy = options.get("--radix-eviction-policy")
    if policy is None or "--radix-eviction" in options:
        return
    group = parser.add_argument_group("canopy", "Workload-aware caching (sglang-canopy).")
    group.add_argument(
        "--radix-eviction",
        dest="radix_eviction_policy",
        default=argparse.SUPPRESS,
        choices=policy.choices,
        help="Short for --radix-eviction-policy. Canopy adds: " + ", ".join(live_names()) + ".",
    )
    group.add_argument(
        "--canopy-enable-forced-output",
        action="store_true",
        help="Obey custom_params.canopy_force_output, a list of token ids that the response "
        "must consist of. For replaying traces; keep it off in production.",
    )
    group.add_argument(
        client_hints.FLAG,
        choices=client_hints.MODES,
        default=client_hints.ON,
        help="Whose hints change what is evicted (POST /canopy/hint, and the fields canopy_over, "
        "canopy_return_in_s, canopy_keep_s, canopy_ttl_s and canopy_pin_s of requests): "
        "everybody's, nobody's, or only those with the admin key or from a gateway that sends the "
        f"secret of ${client_hints.SECRET_VARIABLE} (or of the file "
        f"${client_hints.SECRET_FILE_VARIABLE}) as the header {client_hints.GATEWAY_HEADER}.",
    )
    from sglang_canopy.server import flags as tiers

    tiers.add_flags(group, options)


def _spell_out_alias(argv: list[str]) -> Any:
    """``--radix-eviction X`` counts as an explicit choice of policy, like the long form.

    A plan file stands for arguments of SGLang's too; those that are given win over it.
    """
    short, long = "--radix-eviction", "--radix-eviction-policy"
    spelt = [long + a[len(short) :] if a == short or a.startswith(short + "=") else a for a in argv]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--canopy-plan")
    plan = parser.parse_known_args(spelt)[0].canopy_plan
    if plan is not None:
        try:
            added, overruled = arguments_of_plan(plan, spelt)
        except CanopyError as error:
            _stop(str(error))
        for line in overruled:
            print(f"sglang-canopy: --canopy-plan: not taken: {line}", file=sys.stderr)
        spelt += added
    return (spelt,), {}


def _check_arguments(result: Any, _cls: Any, args: Any) -> None:
    result._canopy_forced_output = getattr(args, "canopy_enable_forced_output", False)
    self_check()
    if result._canopy_forced_output and result.speculative_algorithm:
        _stop(
            "--canopy-enable-forced-output: speculative decoding samples several tokens at once; drop one"
        )
    ours = result.radix_eviction_policy in live_names()
    refusal = unsupported(result) if ours else None
    if refusal:
        _stop(f"--radix-eviction {result.radix_eviction_policy}: {refusal}")
    setattr(
        result,
        client_hints.ATTRIBUTE,
        getattr(args, client_hints.ATTRIBUTE.removeprefix("_"), client_hints.ON),
    )
    try:
        client_hints.rule_of(result)
    except CanopyError as error:
        _stop(str(error))
    from sglang_canopy.server import flags as tiers

    if ours:
        from sglang_canopy.radix.live import live_cache

        try:
            # The profile is the first machine's: the others need no copy of it.
            reads = {"read_profile": lambda _: None} if result.node_rank else {}
            live_cache(result.radix_eviction_policy, result.radix_eviction_policy_config, **reads)
        except CanopyError as error:
            _stop(f"--radix-eviction-policy-config: {error}")
    try:
        tiers.apply(result, args, ours)
    except CanopyError as error:
        _stop(str(error))


def _build_cache(original: Any, ctx: Any) -> Any:
    self_check()
    if ctx.disable_radix_cache or ctx.params.eviction_policy not in live_names():
        return original(ctx)
    return _canopys_cache(ctx)


def _canopys_cache(ctx: Any) -> Any:
    """Our cache. What the command line refuses is refused here for those who did not come by it."""
    refusal = unsupported(ctx.server_args)
    if refusal:
        _stop(f"--radix-eviction {ctx.params.eviction_policy}: {refusal}")
    from sglang_canopy.server.cache_factory import build

    try:
        return build(ctx)
    except CanopyError as error:
        _stop(str(error))


def _request_created(req: Any, scheduler: Any, recv_req: Any, *_: Any, **__: Any) -> None:
    # Images become tokens of their own a little later: until then all images look alike.
    if recv_req.mm_inputs is None:
        _announce(scheduler, req)


def _request_queued(scheduler: Any, req: Any, *_: Any, **__: Any) -> None:
    if req.multimodal_inputs is not None:
        _announce(scheduler, req)


def _announce(scheduler: Any, req: Any) -> None:
    from sglang_canopy.radix.core import CanopyTreeCore

    core = getattr(scheduler.tree_cache, "tree_core", None)
    if isinstance(core, CanopyTreeCore):
        core.request_of(req)


SEAMS = (
    Seam(_SRT + "server_args.ServerArgs.add_cli_args", "after", _add_flags, ("parser",)),
    Seam(_SRT + "server_args.prepare_server_args", "before", _spell_out_alias, ("argv",)),
    Seam(
        _SRT + "server_args.ServerArgs.from_cli_args",
        "after",
        _check_arguments,
        ("cls", "args"),
    ),
    Seam(
        _SRT + "entrypoints.http_server.launch_server",
        "before",
        entry.add_routes,
        ("server_args",),
    ),
    Seam(
        _SRT + "mem_cache.registry.default_radix_cache_factory",
        "around",
        _build_cache,
        ("ctx",),
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler._create_generation_req",
        "after",
        _request_created,
        ("self", "recv_req"),
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler._add_request_to_queue",
        "before",
        _request_queued,
        ("self", "req"),
    ),
    Seam(
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        "after",
        entry.chat_converted,
        ("self", "request", "raw_request"),
    ),
    Seam(
        _SRT
        + "entrypoints.openai.serving_completions.OpenAIServingCompletion"
        + "._convert_to_internal_request",
        "after",
        entry.completion_converted,
        ("self", "request", "raw_request"),
    ),
    Seam(
        _SRT + "managers.tokenizer_manager.TokenizerManager._get_scheduler_first_token_time",
        "after",
        entry.first_token,
        ("state", "recv_obj", "i"),
    ),
    Seam(
        _SRT + "managers.tokenizer_manager.TokenizerManager.generate_request",
        "around",
        entry.generation_begins,
        ("self", "obj", "request"),
    ),
    Seam(
        _SRT + "managers.scheduler.Scheduler.set_internal_state",
        "around",
        entry.hints_arrive,
        ("self", "recv_req"),
    ),
    Seam(
        _SRT + "managers.tokenizer_control_mixin.TokenizerControlMixin.set_internal_state",
        "around",
        entry.internal_state_asked,
        ("self", "obj"),
    ),
    *(Seam(*hook) for hook in weights.HOOKS),
    *(Seam(target, "after", hook, names) for target, hook, names in forced_output.HOOKS),
    *(Seam(*hook) for hook in chunk_hooks.HOOKS),
)
"""Every function of SGLang that Canopy hooks, in one table."""

RELIED_ON = (
    _SRT + "managers.schedule_policy.PrefillAdder.add_one_req",
    _SRT + "mem_cache.storage.backend_factory.StorageBackendFactory.create_backend",
    _SRT + "mem_cache.cache_init_params.CacheInitParams",
    _SRT + "mem_cache.registry.TreeCacheBuildContext",
    _SRT + "managers.scheduler.Scheduler._prefetch_kvcache",
    _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree",
    _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache._all_reduce_attn_groups",
    _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache._handle_prefetch_result",
    _SRT + "plugins.hook_registry.HookRegistry.register",
    _SRT + "plugins.hook_registry.HookRegistry.apply_hooks",
    _SRT + "plugins.load_plugins",
)
"""What Canopy builds on beside its hooks, and beside what ``scripts/sglang_digests.py`` finds in our
source: methods that our classes override, functions that we import, private methods that we call."""

_loaded = False
_compared = False


def load() -> None:
    """Register every hook (entry point ``sglang.srt.plugins``). Idempotent."""
    global _loaded
    if _loaded:
        return
    _loaded = True
    try:
        _check_version()
        for seam in SEAMS:
            _check_seam(seam)
        _register()
    except SystemExit:
        raise
    except Exception as error:
        _stop(f"could not load ({type(error).__name__}: {error})")


def load_for_help() -> None:
    """Put Canopy's options into ``sglang serve --help`` (entry point ``sglang.srt.platforms``).

    That command prints its help before it loads general plugins, but resolves the platform
    first. Brings no platform, and does nothing in any other process.
    """
    if not {"-h", "--help"} & set(sys.argv):
        return
    _register_choices()
    # NOTE: SGLang's argument module is only half imported here, so its parser cannot be hooked.
    parse = argparse.ArgumentParser.parse_args

    def parse_with_flags(parser: Any, *args: Any, **kwargs: Any) -> Any:
        _add_flags(None, parser)
        chunk_hooks.options.add_flags(None, parser)
        return parse(parser, *args, **kwargs)

    argparse.ArgumentParser.parse_args = parse_with_flags  # type: ignore[method-assign]


def self_check() -> None:
    """Prove that every hook is in place and that SGLang's functions are those that Canopy was
    written against, or end the process naming the one that is not."""
    from sglang.srt.arg_groups.choices import RADIX_EVICTION_POLICY_CHOICES

    _check_source()
    for seam in SEAMS:
        if not _is_hooked(seam):
            _stop(f"the hook on {seam.target} did not apply (see the log above)")
    missing = set(live_names()) - set(RADIX_EVICTION_POLICY_CHOICES)
    if missing:
        _stop(f"policies not registered with --radix-eviction-policy: {sorted(missing)}")


def _check_source() -> None:
    global _compared
    if _compared:
        return
    import sglang

    found = digests.changed(Path(sglang.__path__[0]), digests.read_table())
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        _stop(
            f"{', '.join(found[:3])}{more}: not as in sglang {SGLANG_VERSION}, which Canopy was "
            f"written against; this sglang was modified, so install that version anew, or "
            "uninstall sglang-canopy to run without it"
        )
    _compared = True


def _register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    _register_choices()
    for seam in SEAMS:
        HookRegistry.register(seam.target, seam.hook, _kind(seam))
    from sglang_canopy import cpu

    cpu.install()


def _kind(seam: Seam) -> Any:
    from sglang.srt.plugins.hook_registry import HookType

    return HookType(seam.kind)


def _register_choices() -> None:
    from sglang.srt.arg_groups.choices import (
        RADIX_EVICTION_POLICY_CHOICES,
        add_radix_eviction_policy_choices,
    )

    add_radix_eviction_policy_choices(
        [n for n in live_names() if n not in RADIX_EVICTION_POLICY_CHOICES]
    )


def _is_hooked(seam: Seam) -> bool:
    """Whether the hook is on the chain of wrappers that SGLang put around the target."""
    function = inspect.getattr_static(*_owner(seam.target))
    function = getattr(function, "__func__", function)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is seam.hook for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _owner(target: str) -> tuple[Any, str]:
    path, name = target.rsplit(".", 1)
    return pkgutil.resolve_name(path), name


def _check_version() -> None:
    found = importlib.metadata.version("sglang")
    if found != SGLANG_VERSION:
        _stop(
            f"it hooks sglang {SGLANG_VERSION}, but sglang {found} is installed; run "
            f"'pip install --no-deps sglang=={SGLANG_VERSION}', or uninstall sglang-canopy "
            "to run without it"
        )


def _check_seam(seam: Seam) -> None:
    try:
        owner, name = _owner(seam.target)
        function = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        _stop(f"sglang has no {seam.target} ({error})")
    function = inspect.unwrap(getattr(function, "__func__", function))
    found = tuple(inspect.signature(function).parameters)
    if found[: len(seam.parameters)] != seam.parameters:
        _stop(
            f"{seam.target} takes ({', '.join(found)}), expected ({', '.join(seam.parameters)}, "
            "...); this sglang was modified"
        )


def _stop(reason: str) -> NoReturn:
    raise SystemExit(f"sglang-canopy: {reason}")
