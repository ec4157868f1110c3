"""Hooks on SGLang's command line: our flags go in, are expanded, and are checked."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from sglang_canopy.admission.settings import GateSettings
from sglang_canopy.config.gate import FLAG as GATE_FLAG
from sglang_canopy.config.gate import NOTE as GATE_NOTE
from sglang_canopy.config.gate import GateFlags, gate_settings
from sglang_canopy.config.plan_arguments import arguments_of_plan
from sglang_canopy.config.refusals import GATE, POLICIES, unsupported
from sglang_canopy.config.tiers import PLAN_FLAG
from sglang_canopy.config.whatif import NOTE as WHATIF_NOTE
from sglang_canopy.config.whatif import WhatifFlags, whatif_flags
from sglang_canopy.declared import from_args
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import live_names
from sglang_canopy.request import client_hints, forced_output, identity, owner
from sglang_canopy.server import flags, queue
from sglang_canopy.server.self_check import stop


def add_flags(_result: Any, parser: argparse.ArgumentParser, *_: Any) -> None:
    """After ``ServerArgs.add_cli_args``: our flags in SGLang's parser, once, and in no other."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    policy = options.get("--radix-eviction-policy")
    if policy is None or flags.SHORT in options:
        return
    group = parser.add_argument_group("canopy", "Workload-aware caching (sglang-canopy).")
    group.add_argument(
        flags.SHORT,
        dest="radix_eviction_policy",
        default=argparse.SUPPRESS,
        choices=policy.choices,
        help=flags.short_help(),
    )
    flags.add_flags(group, options)


def expand(argv: list[str]) -> Any:
    """Before ``prepare_server_args``: ``--radix-eviction X`` counts as an explicit choice of
    policy, like the long form.

    A plan file stands for arguments of SGLang's too; those that are given win over it.
    """
    short, long = flags.SHORT, "--radix-eviction-policy"
    spelt = [long + a[len(short) :] if a == short or a.startswith(short + "=") else a for a in argv]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(PLAN_FLAG, dest="plan")
    plan = parser.parse_known_args(spelt)[0].plan
    if plan is not None:
        try:
            added, overruled = arguments_of_plan(plan, spelt)
        except CanopyError as error:
            stop(str(error))
        for line in overruled:
            print(f"sglang-canopy: {PLAN_FLAG}: not taken: {line}", file=sys.stderr)
        spelt += added
    return (spelt,), {}


def check(server_args: Any, args: Any) -> None:
    """After ``ServerArgs.from_cli_args``: check what was typed and note it on ``server_args``."""
    try:
        _note(server_args, flags.RequestFlags(**from_args(flags.RequestFlags, args)))
        ours = server_args.radix_eviction_policy in live_names()
        if ours:
            _check_policy(server_args)
        flags.apply(server_args, args, ours)
        queue.note(server_args, args, ours)
        whatif = whatif_flags(from_args(WhatifFlags, args), ours)
        setattr(server_args, WHATIF_NOTE, whatif)
        _note_gate(server_args, gate_settings(GateFlags(**from_args(GateFlags, args))), ours)
    except CanopyError as error:
        stop(str(error))


def _note(server_args: Any, typed: flags.RequestFlags) -> None:
    setattr(server_args, forced_output.ENABLED, typed.enable_forced_output)
    if typed.enable_forced_output and server_args.speculative_algorithm:
        raise CanopyError(
            "--canopy-enable-forced-output: speculative decoding samples several tokens at once; "
            "drop one"
        )
    setattr(server_args, client_hints.ATTRIBUTE, typed.client_hints)
    client_hints.rule_of(server_args)
    setattr(server_args, identity.ATTRIBUTE, typed.identity_sources)
    setattr(server_args, owner.ATTRIBUTE, typed.require_tenant)
    setattr(server_args, owner.CARRIERS_ATTRIBUTE, typed.carriers)


def _note_gate(server_args: Any, gate: GateSettings | None, ours: bool) -> None:
    if gate is not None:
        if not ours:
            raise CanopyError(
                f"{GATE_FLAG} needs {flags.SHORT} with a policy of Canopy's, such as canopy-lru"
            )
        refusal = unsupported(GATE, server_args)
        if refusal:
            raise CanopyError(f"{GATE_FLAG} {gate.mode}: {refusal}")
    setattr(server_args, GATE_NOTE, gate)


def _check_policy(server_args: Any) -> None:
    name, config = server_args.radix_eviction_policy, server_args.radix_eviction_policy_config
    refusal = unsupported(POLICIES, server_args)
    if refusal:
        raise CanopyError(f"{flags.SHORT} {name}: {refusal}")
    from sglang_canopy.radix.live import live_cache
    from sglang_canopy.radix.saved_profile import peek

    # The profile is the first machine's: the others need no copy of it.
    read = (lambda _: None) if server_args.node_rank else peek
    try:
        live_cache(name, config, read_profile=read)
    except CanopyError as error:
        raise CanopyError(f"--radix-eviction-policy-config: {error}") from None
