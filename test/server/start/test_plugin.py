"""Start-up: the self-check finds missing functions, and unsupported set-ups are refused by name."""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import os
import sys
from collections import defaultdict
from types import SimpleNamespace

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs

from sglang_canopy import SGLANG_VERSION, releases
from sglang_canopy.config.queue import BOUNDED_SHORTEST, QueueFlags
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.server_options import ATTRIBUTE, ServerOptions
from sglang_canopy.config.setups import FLAGS, GATE, HTTP_APPS, POLICIES, QUEUE, SETUPS
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start import arguments, self_check
from sglang_canopy.server.start.hook import Hook
from sglang_canopy.server.start.hooks import HOOKS


def server_args(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(**{"disaggregation_mode": "null", **fields})


def test_every_hooked_function_exists_in_the_pinned_sglang() -> None:
    for hook in HOOKS:
        self_check.check_signature(hook)
    self_check.check_complete()


@pytest.mark.parametrize("flags", [[], ["--radix-eviction", "wa"], ["--canopy-observe"]])
@pytest.mark.parametrize(
    ("changed_fields", "message"),
    [
        ({"target": "sglang.srt.server_args.ServerArgs.gone"}, r"ServerArgs\.gone"),
        ({"parameters": ("parser", "extra")}, r"expected \(parser, extra"),
    ],
)
def test_another_function_of_sglangs_stops_only_a_server_with_flags_of_canopys(
    monkeypatch, flags, changed_fields, message
) -> None:
    monkeypatch.setattr(releases, "START_REFUSALS", [])
    monkeypatch.setattr(releases, "SWITCHED_OFF", {})
    self_check.check_signature(dataclasses.replace(HOOKS[0], **changed_fields))
    parser = argparse.ArgumentParser()
    parser.add_argument("--radix-eviction-policy", choices=["lru", "wa"], default="lru")
    arguments.add_flags(None, parser)
    args = parser.parse_args(flags)
    server_args = ServerArgs(model_path="dummy", radix_eviction_policy=args.radix_eviction_policy)
    with pytest.raises(SystemExit, match=message) if flags else contextlib.nullcontext():
        arguments.check_arguments(server_args, args)


def test_a_hook_that_did_not_apply_stops_the_process() -> None:
    unapplied_hook = dataclasses.replace(HOOKS[0], function=lambda *_: None)
    with pytest.raises(SystemExit, match="did not apply"):
        self_check.check_in_place((unapplied_hook,))


def test_a_hook_that_is_a_wrapper_itself_is_in_place(monkeypatch) -> None:
    """Benchmarks wrap a hook's function to time it."""
    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setitem(sys.modules, "hooked", SimpleNamespace(work=lambda: 1))
    wrapper = functools.wraps(server_args)(lambda *_: None)
    hook = Hook("hooked.work", "before", wrapper, ())
    hook.register()
    assert not hook.is_in_place()
    HookRegistry.apply_hooks()
    assert hook.is_in_place()


def test_another_version_of_sglang_is_named_in_the_log(monkeypatch, caplog):
    monkeypatch.setattr(self_check.importlib.metadata, "version", lambda _: "0.5.99")
    self_check.check_version()
    assert "0.5.99 is installed" in caplog.text


@pytest.mark.parametrize("variable", ["SGLANG_RUST_SERVER", "SGLANG_HTTP_SERVER_APP_PATH"])
def test_an_entry_point_set_by_a_variable_is_refused_by_name(variable: str) -> None:
    refusal = unsupported_reason(POLICIES, server_args(), environment={variable: "1"})
    assert refusal is not None
    assert "--radix-eviction lru" in refusal
    environment = {"SGLANG_RUST_SERVER": "0"}
    assert unsupported_reason(POLICIES, server_args(), environment=environment) is None


@pytest.mark.parametrize(
    ("workers", "application", "expected"),
    [(1, None, None), (2, None, HTTP_APPS[1]), (2, HTTP_APPS[0], HTTP_APPS[1]), (2, "a:b", "a:b")],
)
def test_workers_import_our_application_unless_the_operator_names_one(
    monkeypatch: pytest.MonkeyPatch, workers: int, application: str | None, expected: str | None
) -> None:
    from sglang_canopy.server.http import routes

    monkeypatch.setenv(routes.APP_VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(routes.APP_VARIABLE)
    if application is not None:
        monkeypatch.setenv(routes.APP_VARIABLE, application)
    routes.use_our_application(server_args(tokenizer_worker_num=workers))
    assert os.environ.get(routes.APP_VARIABLE) == expected
    is_refused = unsupported_reason(POLICIES, server_args()) is not None
    assert is_refused == (expected not in (None, *HTTP_APPS))


def test_every_option_that_is_checked_exists_in_the_pinned_sglang() -> None:
    import msgspec
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext
    from sglang.srt.server_args import ServerArgs

    sglang_fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    sglang_fields |= {field.name for field in dataclasses.fields(TreeCacheBuildContext)}
    refusing_setups = [setup for setup in SETUPS if any(map(setup.reason, FLAGS))]
    options = {setup.option for setup in refusing_setups if setup.option}
    assert options | {"hicache_storage_backend"} <= sglang_fields
    variables = {setup.variable for setup in SETUPS if setup.variable}
    assert "SGLANG_RUST_SERVER" in variables
    if importlib.metadata.version("sglang") == SGLANG_VERSION:
        assert all(hasattr(envs, name) for name in variables)


def test_a_plain_set_up_is_supported() -> None:
    for feature in (POLICIES, GATE, QUEUE):
        assert unsupported_reason(feature, server_args(), environment={}) is None


STORAGE_BACKENDS = ("dynamic", "mooncake", "file")
QUEUE_OPTIONS = {ATTRIBUTE: ServerOptions(queue=QueueFlags(queue_order=BOUNDED_SHORTEST))}


def context_of(storage_backend: str, **model_kinds: object) -> dict[str, object]:
    context = {"is_hybrid_swa": False, "is_hybrid_ssm": False, **model_kinds}
    return {"server_args": server_args(hicache_storage_backend=storage_backend), **context}


@pytest.mark.parametrize(
    ("message", "context"),
    [
        # SGLang does for some models, after the command line was checked.
        ("turns the prefix cache off", {"server_args": server_args(disable_radix_cache=False), "disable_radix_cache": True}),
        ("launch_server", context_of("canopy")),
        ("--enable-lmcache.*--radix-eviction lru", {"server_args": server_args(enable_lmcache=True)}),
        ("--canopy-queue-order bounded-shortest: --pp-size 2", {"server_args": server_args(pp_size=2, hicache_storage_backend=None, **QUEUE_OPTIONS)}),
        *(("sliding windows.*--hicache-storage-backend", context_of(name, is_hybrid_swa=True)) for name in STORAGE_BACKENDS),
        *(("Mamba.*--hicache-storage-backend", context_of(name, is_hybrid_ssm=True)) for name in STORAGE_BACKENDS),
        ("layers all have sliding windows", {"server_args": server_args(), "is_hybrid_swa": True, "full_tokens_per_layer": 0}),
    ],
)  # fmt: skip
def test_the_cache_is_refused_by_name_for_a_server_without_a_command_line(message, context):
    from sglang_canopy.server.scheduler.cache_factory import build_cache

    params = SimpleNamespace(eviction_policy="wa")
    with pytest.raises(CanopyError, match=message):
        build_cache(SimpleNamespace(params=params, **context))  # type: ignore[arg-type]


def test_the_alias_counts_as_an_explicit_choice() -> None:
    args, _ = arguments.expand_arguments(["--radix-eviction", "wa", "--radix-eviction=lru", "--x"])
    assert args[0] == ["--radix-eviction-policy", "wa", "--radix-eviction-policy=lru", "--x"]


def test_flags_are_added_once_and_only_to_sglangs_parser() -> None:
    other_parser = argparse.ArgumentParser()
    arguments.add_flags(None, other_parser)
    assert "--radix-eviction" not in other_parser.format_help()
    parser = argparse.ArgumentParser()
    parser.add_argument("--radix-eviction-policy", choices=["lru", "wa"])
    arguments.add_flags(None, parser)
    arguments.add_flags(None, parser)
    assert parser.parse_args(["--radix-eviction", "wa"]).radix_eviction_policy == "wa"


def test_help_shows_common_flags_and_points_to_the_rest() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--radix-eviction-policy", choices=["lru", "wa"])
    arguments.add_flags(None, parser)
    help_text = parser.format_help()
    for flag in ("--canopy-observe", "--canopy-ttl", "--canopy-host-eviction"):
        assert flag in help_text
    for flag in ("--canopy-session-gate", "--canopy-client-hints", "--canopy-disk "):
        assert flag not in help_text
    assert "docs/reference/flags.md" in help_text
    args = parser.parse_args(["--canopy-session-gate", "auto"])
    assert args.canopy_session_gate == "auto"
