"""``canopy profile``: measure a live server's costs into a file for the simulator."""

from __future__ import annotations

import datetime
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from canopy_lab.cli.shared import ConnectionOptions
from canopy_lab.cli.values import out_file, write_json
from canopy_lab.live.profile.client import ProfiledServer
from canopy_lab.live.profile.measure import Limits, Measurer
from canopy_lab.live.profile.tiers import measure_tiers
from canopy_lab.sim.model import load_model_shape
from canopy_lab.sim.system.engine_profile import MEASURED, Bandwidth, EngineProfile
from sglang_canopy import declared
from sglang_canopy.declared import declare
from sglang_canopy.errors import CanopyError


@dataclass(frozen=True, slots=True)
class Options(ConnectionOptions, declared.Checked):
    url: str = declare(
        None, "--url", "the server; it must serve no other requests meanwhile", metavar="URL",
        required=True,
    )  # fmt: skip
    output: Path = declare(
        None, "--out", "file for the profile, JSON", metavar="FILE", parse=out_file, required=True,
    )  # fmt: skip
    device: str | None = declare(
        None, "--device", "description of the server's hardware", metavar="WORDS"
    )
    max_prompt: int = declare(
        8192, "--max-prompt-tokens", "longest prompt, in tokens", metavar="N", low=1
    )
    max_context: int = declare(
        16384, "--max-context-tokens", "longest cached prefix", metavar="N", low=0
    )
    max_batch: int = declare(
        64, "--max-batch", "most requests that decode together", metavar="N", low=1
    )
    repeats: int = declare(
        3, "--repeats", "every figure is the median of N answers", metavar="N", low=1
    )
    kv_bytes_per_token: int | None = declare(
        None, "--kv-bytes-per-token", "bytes of one token's KV, on all ranks", metavar="N", low=1,
        shown_default="the server's pools over their tokens",
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> int:
    profile = measure(args)
    write_json(args.output, profile.to_json())
    print(f"{args.output}: {profile.name}")
    for tokens in profile.attention_new_tokens:
        print(f"  prefill of {tokens:>6g} tokens {profile.prefill_s(tokens) * 1000:10.1f} ms")
    for batch, row in zip(profile.decode_batch, profile.decode_step_s, strict=True):
        print(f"  decode step of {batch:>3g} requests {row[0] * 1000:8.1f} ms")
    for tier in ("host", "disk"):
        bandwidth = getattr(profile, tier)
        if bandwidth is None:
            print(f"  {tier}: not known")
        else:
            read, write = bandwidth.read_bytes_per_s / 1e6, bandwidth.write_bytes_per_s / 1e6
            print(f"  {tier}: reads {read:.0f} MB/s, writes {write:.0f} MB/s")
    return 0


def measure(args: Options) -> EngineProfile:
    """Return the profile of the server at ``args.url``."""
    server = ProfiledServer(args.url, args.key)
    facts = server.facts
    pool = server.pool_tokens
    chunk = int(facts.get("chunked_prefill_size") or 0)
    max_prompt = min(args.max_prompt, chunk if chunk > 0 else args.max_prompt, pool // 2)
    context_length = int(facts.get("context_length") or pool)
    max_context = min(args.max_context, pool - max_prompt - 64, context_length)
    limits = Limits(max_prompt, max(max_context, 0), args.max_batch, args.repeats)
    kv_bytes, layers = _kv_bytes_and_layers(args, server)

    def show(stage: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K{stage}", end="", file=sys.stderr, flush=True)

    measurer = Measurer(server, limits, show)
    costs = measurer.measure_surfaces()
    show("bandwidths")
    tiers = measure_tiers(measurer, kv_bytes)
    show("")
    model = Path(str(facts.get("served_model_name") or facts["model_path"])).name
    is_cpu = str(facts.get("device")) == "cpu"
    device = args.device or (f"CPU {platform.machine()}" if is_cpu else str(facts.get("device")))
    return EngineProfile(
        name=f"{model} on {device}",
        model=model,
        device=device,
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        source=MEASURED,
        sources=(f"canopy profile --max-prompt-tokens {max_prompt} --max-context-tokens {limits.context_tokens} "
                 f"--max-batch {args.max_batch} --repeats {args.repeats}",),
        kv_bytes_per_token=kv_bytes,
        # On a CPU, copies do not overlap with computation.
        layers=1 if is_cpu else layers,
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


def _kv_bytes_and_layers(args: Options, server: ProfiledServer) -> tuple[int, int]:
    """Return the KV bytes per token (given, of the pools or of the config), and the layers."""
    facts, kv_bytes = server.facts, args.kv_bytes_per_token or server.kv_bytes_per_token()
    try:
        shape = load_model_shape(str(facts["model_path"]))
    except CanopyError:
        if kv_bytes is None:
            raise CanopyError(
                f"the model's config is not at {facts['model_path']!r} on this machine; give "
                "--kv-bytes-per-token"
            ) from None
        return kv_bytes, 1
    cache, dtype = str(facts.get("kv_cache_dtype") or "auto"), str(facts.get("dtype"))
    dtype_factor = 0.5 if "fp8" in cache else 2 if cache == "auto" and "float32" in dtype else 1
    return kv_bytes or round(shape.kv_bytes_per_token() * dtype_factor), shape.layers
