"""The command line of ``canopy plan``, checked and converted to the planner's input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any

from canopy_lab.advise.advice import advise_policy
from canopy_lab.advise.sample import sample_of
from canopy_lab.cli.plan_options import Choosing, EngineOptions, Reading, Searching, Writing
from canopy_lab.plan.disk_class import GIB
from canopy_lab.plan.prices import Prices, load_prices
from canopy_lab.plan.request import PlanRequest
from canopy_lab.plan.space import KNOBS, Configuration
from canopy_lab.plan.system import Engine
from canopy_lab.plan.worker import PlanInputs
from canopy_lab.sim.compact import CompactTrace
from canopy_lab.sim.system.engine_profile import EngineProfile, load_profile
from sglang_canopy.config import auto
from sglang_canopy.config.server_settings import ServerSettings, default_chunk_tokens
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import AUTO, CANOPYS_LRU, SGLANGS_LRU

ADVICE_REQUESTS = 5_000
"""Requests for the comparison of policies, in whole conversations."""
DEVICE_GIB = 40.0
"""Default KV memory of a device, if the profile has no figure."""


@dataclass(frozen=True, slots=True)
class PlanCommand:
    """The checked command line."""

    format: str
    reading: Reading
    choosing: Choosing
    engine_options: EngineOptions
    searching: Searching
    writing: Writing
    request: PlanRequest
    profile: EngineProfile
    engine: Engine
    prices: Prices
    policy_configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def check_options(
    reading: Reading,
    choosing: Choosing,
    engine_options: EngineOptions,
    searching: Searching,
    writing: Writing,
) -> PlanCommand:
    """Check all options together. Raises ``CanopyError`` naming the first wrong option."""
    profile = load_profile(engine_options.profile.name)
    request = _make_request(choosing, engine_options, searching)
    prices = _load_prices(
        choosing.prices, profile, engine_options.profile.gpu_per_hour, engine_options.server.gpus
    )
    for name in request.disks or ():
        prices.disk(name)
    engine = _make_engine(engine_options, profile)
    choices = request.choices
    for page, chunk in product(choices["page_size"], choices["chunked_prefill_size"]):
        engine.settings_of(Configuration(page_size=page, chunked_prefill_size=chunk))
    PlanInputs(CompactTrace(()), engine, prices)
    options = (reading, choosing, engine_options, searching, writing)
    return PlanCommand(reading.detected_format, *options, request, profile, engine, prices)


def _make_request(choosing: Choosing, engine: EngineOptions, searching: Searching) -> PlanRequest:
    server, search = engine.server, searching.search
    knob_values = {knob.name: getattr(server, knob.name, None) for knob in KNOBS}
    chunks = server.chunked_prefill_size or (default_chunk_tokens(server.gpu_memory_gib),)
    choices = knob_values | {"ttl": choosing.ttl, "chunked_prefill_size": chunks}
    return PlanRequest(
        **{field.name: getattr(search, field.name) for field in fields(search)},
        disks=choosing.disks,
        instances=choosing.instances,
        choices={name: values for name, values in choices.items() if values},
        constraints=choosing.slo,
        minimise=choosing.minimised,
    )


def _load_prices(
    name: str, profile: EngineProfile, gpu_per_hour: float | None, gpus: int | None
) -> Prices:
    """Load the price list, with the profile's GPUs per instance and the given price of a GPU-hour.

    Raises ``CanopyError`` without that price if the list's GPU is another than the profile's.
    """
    prices, profile_gpus = load_prices(name), profile.notes.get("gpus")
    if gpu_per_hour is not None:
        prices = replace(prices, gpu_per_hour=gpu_per_hour, gpu="")
    if prices.gpu not in profile.device:
        raise CanopyError(
            f"price list {prices.name} has the GPU-hour of {prices.gpu}, and profile {profile.name} is of "
            f"{profile.device}; give its price: --profile {profile.name}=USD, or a list of your own "
            "(--prices)"
        )
    if gpus is None and type(profile_gpus) is int:
        gpus = profile_gpus
    return prices if gpus is None else replace(prices, gpus_per_instance=gpus)


def _make_engine(options: EngineOptions, profile: EngineProfile) -> Engine:
    device_tokens, profile_tokens = options.device_tokens, profile.notes.get("device_tokens")
    is_pool_known = device_tokens is not None or type(profile_tokens) is int
    if device_tokens is None:
        assumed = round(DEVICE_GIB * GIB / profile.kv_bytes_per_token)
        device_tokens = profile_tokens if type(profile_tokens) is int else assumed
    knob_settings = {knob.setting for knob in KNOBS}
    names = [name for name in ServerSettings.__slots__ if name not in knob_settings]
    settings = ServerSettings(**{name: getattr(options.server, name, None) for name in names})
    return Engine(profile, device_tokens, options.routing, settings, is_pool_known)


def with_advised_policy(command: PlanCommand, trace: CompactTrace) -> tuple[PlanCommand, str]:
    """Return ``command`` with its policy, and the reason in words.

    Without a policy, use the result of ``advise`` at the devices' pools.
    """
    policy = command.choosing.policy
    name, config = policy.name, policy.config
    flag, why = name, f"Policy: {name}, as you asked."
    if name is None:
        pool = command.engine.device_tokens * min(command.request.instances)
        sample = sample_of(trace, ADVICE_REQUESTS)
        arm, decision = advise_policy(sample, command.profile, pool, jobs=command.searching.jobs)
        flag = CANOPYS_LRU if arm.flag == SGLANGS_LRU else arm.flag
        name, config = flag, None
        why = f"Policy: {flag}, as canopy advise finds. {decision.sentence}"
    if flag == AUTO:
        name, command = auto.AUTO_POLICY, _as_auto(command)
    request = replace(command.request, policy=name)
    return replace(command, request=request, policy_configs={name: config} if config else {}), why


def _as_auto(command: PlanCommand) -> PlanCommand:
    """Return ``command`` for servers under ``auto``.

    Sets its order of the queue, and an exclusive host tier unless a write policy was given.
    """
    request = command.request
    if command.engine_options.server.write_policy is None:
        choices = {**request.choices, "write_policy": (auto.WRITE_BACK,)}
        request = replace(request, choices=choices)
    return replace(command, request=request, engine=replace(command.engine, is_auto=True))
