"""Hooks on SGLang's command line: add, expand and check Canopy's flags."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from sglang_canopy import declared
from sglang_canopy.admission.activation import GateSettings
from sglang_canopy.config import auto, queue
from sglang_canopy.config.refusals import unsupported_reason
from sglang_canopy.config.server_options import ATTRIBUTE, GATE_FLAG, RequestOptions, ServerOptions
from sglang_canopy.config.setups import GATE, POLICIES
from sglang_canopy.config.whatif import MeterOptions, WhatifFlags, meter_options
from sglang_canopy.declared import typed_values
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.request import client_hints
from sglang_canopy.server.start import flags
from sglang_canopy.server.start.self_check import check_complete, stop

GROUP_HELP = "Workload-aware caching (sglang-canopy). More flags: docs/reference/flags.md."


def add_flags(_result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
    """Hook after ``ServerArgs.add_cli_args``: add Canopy's flags once, and to SGLang's parser only."""
    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    policy_action = actions.get("--radix-eviction-policy")
    if policy_action is None or flags.SHORT_FLAG in actions:
        return
    group = parser.add_argument_group("canopy", GROUP_HELP)
    group.add_argument(
        flags.SHORT_FLAG,
        dest="radix_eviction_policy",
        default=argparse.SUPPRESS,
        choices=policy_action.choices,
        help=flags.short_help(),
    )
    flags.add_flags(group, actions)


def expand_arguments(argv: list[str]) -> Any:
    """Hook before ``prepare_server_args``: expand ``--radix-eviction`` and ``auto``. ``--radix-eviction
    X`` becomes the long form. The file of ``--config`` is read as SGLang does, since it may name a
    policy; arguments on the command line override it."""
    short, long = flags.SHORT_FLAG, "--radix-eviction-policy"
    expanded = [
        long + arg[len(short) :] if arg == short or arg.startswith(short + "=") else arg
        for arg in _with_config(argv)
    ]
    return (expanded + auto.added_arguments(expanded),), {}


def _with_config(argv: list[str]) -> list[str]:
    """Return ``argv`` with the arguments of SGLang's ``--config`` file in its place."""
    if "--config" not in argv:
        return argv
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    merged: list[str] = ConfigArgumentMerger(parser).merge_config_with_args(argv)
    return merged


def check_arguments(server_args: Any, args: Any) -> None:
    """Hook after ``ServerArgs.from_cli_args``: check Canopy's flags and store them on ``server_args``."""
    try:
        is_auto = server_args.radix_eviction_policy == AUTO
        if is_auto:
            server_args.radix_eviction_policy = auto.AUTO_POLICY
        is_canopy = server_args.radix_eviction_policy in live_names()
        if is_canopy or flags.has_canopy_flags(server_args, args):
            check_complete()
        requests = RequestOptions(**typed_values(RequestOptions, args))
        _check_requests(server_args, requests)
        if is_canopy:
            _check_policy(server_args)
        options = ServerOptions(
            requests=requests,
            tiers=flags.resolve_tiers(server_args, args, is_canopy),
            queue=queue.check_flags(
                server_args, args, is_canopy, auto.queue_defaults(server_args) if is_auto else {}
            ),
            meter=_meter_options(args, is_canopy, is_auto),
        )
        if is_auto:
            options = dataclasses.replace(options, auto=auto.part_states(server_args, options))
        _check_gate(server_args, options.gate, is_canopy)
    except CanopyError as error:
        stop(str(error))
    setattr(server_args, ATTRIBUTE, options)


def _meter_options(args: Any, is_canopy: bool, is_auto: bool) -> MeterOptions | None:
    options = meter_options(declared.read(WhatifFlags, args), is_canopy)
    return MeterOptions() if options is None and is_auto else options


def _check_requests(server_args: Any, requests: RequestOptions) -> None:
    client_hints.rule_of(requests.client_hints, server_args.admin_api_key)


def _check_gate(server_args: Any, gate: GateSettings | None, is_canopy: bool) -> None:
    if gate is None:
        return
    if not is_canopy:
        raise CanopyError(
            f"{GATE_FLAG} needs {flags.SHORT_FLAG} with a Canopy policy, such as canopy-lru"
        )
    refusal = unsupported_reason(GATE, server_args)
    if refusal:
        raise CanopyError(f"{GATE_FLAG}: {refusal}")


def _check_policy(server_args: Any) -> None:
    name, config = server_args.radix_eviction_policy, server_args.radix_eviction_policy_config
    refusal = unsupported_reason(POLICIES, server_args)
    if refusal:
        raise CanopyError(f"{flags.SHORT_FLAG} {name}: {refusal}")
    from sglang_canopy.radix.live import make_policies

    try:
        make_policies(name, config)
    except CanopyError as error:
        raise CanopyError(f"--radix-eviction-policy-config: {error}") from None
