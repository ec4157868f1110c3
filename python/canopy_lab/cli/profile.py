"""``canopy profile``: measure a live server's costs into a file for the simulator."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from typing import Any

from canopy_lab.cli import profile_tables
from canopy_lab.profiling.client import ProfiledServer
from canopy_lab.profiling.measure import Limits, Measurer
from canopy_lab.profiling.tiers import measure_tiers
from canopy_lab.sim.model import load_model_shape
from canopy_lab.sim.system.engine_profile import MEASURED, Bandwidth, EngineProfile
from sglang_canopy.errors import CanopyError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``canopy profile``."""
    add = parser.add_argument
    add(
        "--url",
        metavar="URL",
        help="the server; it must serve no other requests meanwhile",
    )
    add("--output", required=True, metavar="FILE", help="where the profile goes, JSON")
    add("--name", help="what the profile is called; by default the model and the device")
    add("--device", help="what the server runs on, in words")
    add("--max-prompt", type=int, default=8192, metavar="N", help="longest prompt, in tokens")
    add("--max-context", type=int, default=16384, metavar="N", help="longest cached prefix")
    add("--max-batch", type=int, default=64, metavar="N", help="most requests that decode together")
    add(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="every figure is the median of N answers",
    )
    add(
        "--kv-bytes-per-token",
        type=int,
        metavar="N",
        help="KV bytes of a token, if the model's config is not on this machine",
    )
    add("--seed", type=int, default=0, metavar="K", help="seed of the random prompts")
    profile_tables.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, check, write."""
    out = Path(args.output)
    if not out.resolve().parent.is_dir():
        raise CanopyError(f"cannot write {args.output!r}: its folder does not exist; make it first")
    for option in ("max_prompt", "max_batch", "repeats"):
        if getattr(args, option) < 1:
            raise CanopyError(f"--{option.replace('_', '-')} must be 1 or more")
    if bool(args.url) == bool(args.aiconfigurator):
        raise CanopyError(
            "give one of --url, a server to measure, and --aiconfigurator, published kernel times"
        )
    profile = profile_tables.profile_of(args) if args.aiconfigurator else measure(args)
    out.write_text(json.dumps(profile.to_json(), indent=1) + "\n", encoding="utf-8")
    print(f"{args.output}: {profile.name}")
    for new in profile.attention_new_tokens:
        print(f"  prefill of {new:>6g} tokens {profile.prefill_s(new) * 1000:10.1f} ms")
    for batch, row in zip(profile.decode_batch, profile.decode_step_s, strict=True):
        print(f"  decode step of {batch:>3g} requests {row[0] * 1000:8.1f} ms")
    for tier in ("host", "disk"):
        speed = getattr(profile, tier)
        if speed is None:
            print(f"  {tier}: not known")
        else:
            read, write = speed.read_bytes_per_s / 1e6, speed.write_bytes_per_s / 1e6
            print(f"  {tier}: reads {read:.0f} MB/s, writes {write:.0f} MB/s")
    return 0


def measure(args: argparse.Namespace) -> EngineProfile:
    """The profile of the server at ``args.url``."""
    server = ProfiledServer(args.url)
    facts = server.facts
    pool = server.pool_tokens
    chunk = int(facts.get("chunked_prefill_size") or 0)
    longest = min(args.max_prompt, chunk if chunk > 0 else args.max_prompt, pool // 2)
    context = min(args.max_context, pool - longest - 64, int(facts.get("context_length") or pool))
    limits = Limits(longest, max(context, 0), args.max_batch, args.repeats)
    kv_bytes, layers = _shape(args, facts)

    def say(what: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)

    measurer = Measurer(server, limits, args.seed, say)
    costs = measurer.surfaces()
    say("bandwidths")
    tiers = measure_tiers(measurer, kv_bytes)
    say("")
    model = str(facts.get("served_model_name") or Path(str(facts["model_path"])).name)
    model = Path(model).name
    on_cpu = str(facts.get("device")) == "cpu"
    device = args.device or (f"CPU {platform.machine()}" if on_cpu else str(facts.get("device")))
    return EngineProfile(
        name=args.name or f"{model} on {device}",
        model=model,
        device=device,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        source=MEASURED,
        sources=(f"canopy profile --max-prompt {longest} --max-context {limits.context_tokens} "
                 f"--max-batch {args.max_batch} --repeats {args.repeats}",),
        kv_bytes_per_token=kv_bytes,
        # On a CPU nothing is copied beside the computing.
        layers=1 if on_cpu else layers,
        arrival_s=costs.arrival_s,
        prefill_request_s=costs.prefill_request_s,
        prefill_tokens=costs.prefill_tokens,
        prefill_linear_s=costs.prefill_linear_s,
        attention_new_tokens=costs.prefill_tokens,
        attention_context_tokens=costs.attention_context_tokens,
        attention_s=costs.attention_s,
        decode_batch=costs.decode_batch,
        decode_context_tokens=costs.decode_context_tokens,
        decode_step_s=costs.decode_step_s,
        host=Bandwidth(**tiers["host"]) if "host" in tiers else None,
        disk=Bandwidth(**tiers["disk"]) if "disk" in tiers else None,
        notes={
            "sglang": str(facts.get("version")),
            "dtype": str(facts.get("dtype")),
            "page_size": server.page_tokens,
            "attention_backend": str(facts.get("attention_backend")),
        },
    )  # fmt: skip


def _shape(args: argparse.Namespace, facts: dict[str, Any]) -> tuple[int, int]:
    """KV bytes a token, and layers."""
    given = args.kv_bytes_per_token
    try:
        shape = load_model_shape(str(facts["model_path"]))
    except CanopyError:
        if given is None:
            raise CanopyError(
                f"the model's config is not at {facts['model_path']!r} on this machine; give "
                "--kv-bytes-per-token"
            ) from None
        return given, 1
    wide = "float32" in str(facts.get("dtype")) and facts.get("kv_cache_dtype") in (None, "auto")
    return given or shape.kv_bytes_per_token() * (2 if wide else 1), shape.layers
