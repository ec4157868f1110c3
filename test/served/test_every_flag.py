"""Every documented flag and value on a server with warm-up and probes, stopped by SIGTERM."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from canopy_documents.plugin.entry import FLAG as DOCUMENTS
from sglang_canopy.config.queue import BOUNDED_SHORTEST
from sglang_canopy.config.queue import FLAG as ORDER
from sglang_canopy.config.whatif import FLAG as WHATIF
from sglang_canopy.config.whatif import OBSERVE_FLAG
from sglang_canopy.declared import declared
from sglang_canopy.policy.registry import AUTO, live_names
from sglang_canopy.server.start.flags import KINDS
from support.prompts import token_ids

TTL = json.dumps({"residual_ttl_s": 3600, "categories": {"rag": 60}})
VALUES = {
    "--canopy-host-eviction": ("canopy-lru", "wa,min_samples=30"),
    "--canopy-disk-eviction": ("wa", "canopy-lru"),
    "--canopy-ttl": (TTL,),
    "--canopy-host-ttl": (TTL,),
    "--canopy-host-gb": ("0.02",),
    "--canopy-disk": ("tenant_quota_gb=1",),
    "--canopy-drain-s": ("25", "0"),
    "--canopy-session-gate": ("auto", "off"),
    "--canopy-max-wait-factor": ("2",),
    WHATIF: ("auto", "wa,canopy-lru,capacity=1:4", "auto,floor=off"),
    DOCUMENTS: ("on", "off", "separator=###,ratio=0.3,encode=prefix,min_tokens=8"),
}
"""Values of flags without choices."""
TIERS = (
    *("--enable-hierarchical-cache", "--hicache-storage-backend", "canopy"),
    *("--page-size", "1"),
)


def flags(number: int, *kinds: type) -> list[str]:
    """Return the flags of ``kinds``, each with its value of this number."""
    found: dict[str, str | None] = {}
    for kind in kinds:
        for field, option in declared(kind):
            values = option.choices or VALUES.get(option.flag, ())
            assert values or "bool" in str(field.type), f"give values of {option.flag}"
            found[option.flag] = values[number % len(values)] if values else None
    if found.get(ORDER) != BOUNDED_SHORTEST:
        found.pop("--canopy-max-wait-factor", None)
    return [word for pair in found.items() for word in pair if word is not None]


STARTS = {
    name: [
        *("--radix-eviction", name, *TIERS, DOCUMENTS, VALUES[DOCUMENTS][number % 3]),
        *(f for f in flags(number, *KINDS) if f != OBSERVE_FLAG),
    ]
    for number, name in enumerate((AUTO, *live_names()))
}
BELOW_LRU = "a disk below SGLang's lru"
STARTS[BELOW_LRU] = ["--radix-eviction", "lru", *TIERS]
STARTS["observe"] = ["--radix-eviction", "lru", OBSERVE_FLAG, WHATIF, "auto"]
STARTS["observe"] += ["--canopy-require-tenant", "on"]


@pytest.mark.long
@pytest.mark.parametrize("name", STARTS)
def test_it_starts_serves_and_drains(server, small_model, tmp_path, name: str) -> None:
    disk = json.dumps({"path": str(tmp_path / "disk"), "capacity_gb": 0.05})
    flags = [*STARTS[name], "--admin-api-key", "admin"]
    if TIERS[0] in flags:
        flags += ["--hicache-storage-backend-extra-config", disk]
    size = 5000 if name == BELOW_LRU else 300  # many pages, whose writes SGLang waits 10 s for
    with server(small_model, *flags, kv_tokens=4096 if size == 300 else 16384) as client:
        for _ in range(2):  # an idle server generates a token for each
            for probe in ("/health", "/health_generate", "/ready"):
                client.get(probe)
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, client, size, number) for number in range(3)]
            os.kill(client.server.process.pid, signal.SIGTERM)
            assert [one.result()["meta_info"]["completion_tokens"] for one in asked] == [200] * 3
        client.server.process.wait(timeout=120)
        log = client.server.log_text()
    assert "Traceback" not in log
    assert "Force exiting" not in log


def ask(client: Any, size: int, seed: int) -> dict[str, Any]:
    return client.generate(token_ids(size, seed), 200, cache_salt="tenant")
