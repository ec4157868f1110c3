"""Own stand-ins on real servers: prompts are measured while the server is idle, the trial ends, and
what is served stays exact where it is to be; a deleted document leaves nothing."""

from __future__ import annotations

import json
import threading

import pytest

from support.chunk_client import DOCUMENT, ask, learn, prompt, report, state, tokens
from support.small_models import LLAMA, write_model

OWN = (
    *("--canopy-chunks", "on", "--canopy-chunk-encode", "standin"),
    *("--canopy-chunk-stand-in", "corpus", "--canopy-chunk-tenant-share", "1"),
)
CANDIDATE, LOOKS = 8, (12, 24)


@pytest.fixture(scope="module")
def llama(tmp_path_factory, smollm2):
    """Its weights are large enough that what stands in before a document is felt behind it."""
    return write_model(tmp_path_factory.mktemp("llama"), smollm2, LLAMA)


def measured(client, count: int) -> dict:
    """The state once so many prompts were measured. Between two looks the server is idle: every one
    is a request, and gives way to none."""
    while (found := state(client)["stand_ins"])["measured_prompts"] < count:
        threading.Event().wait(0.2)
        assert found["tenants"][0]["on_trial"]
    return found


def run_trial(client, **owner) -> dict:
    """Documents 1 and 2 come together again and again; then other prompts, until it has ended."""
    for i in range(CANDIDATE):
        ask(client, *prompt((1, 2, 10 + i), i), 1, **owner)
    for i in range(LOOKS[-1]):
        ask(client, *prompt((30 + 2 * i, 31 + 2 * i), 40 + i), 1, **owner)
        found = measured(client, i + 1)
        if found["won"] + found["lost"]:
            return found
    raise AssertionError(f"no end: {found}")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trial_runs_to_its_end_beside_requests(server, llama, ranks) -> None:
    more = ("--tp", "2") if ranks == 2 else ()
    cores = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"} if ranks == 2 else {}
    with server(llama, *OWN, *more, kv_tokens=8192, environment=cores, ready_s=450) as client:
        name = client.post("/canopy/chunks", {"input_ids": tokens(DOCUMENT, 2)})["id"]
        found = run_trial(client)
        (tenant,) = found["tenants"]
        assert tenant["measured"] in LOOKS
        assert tenant["kl_neutral"] > 0
        assert tenant["kl_own"] > 0
        assert abs(tenant["difference"] - tenant["kl_own"] + tenant["kl_neutral"]) < 1e-5
        assert tenant["stand_in"] == ("own" if found["won"] else "neutral")
        learn(client, [(3, 4, 5)])
        learn(client, [(3, 4, 5)])
        told = report(ask(client, *prompt((5, 3, 4), 1), 4))
        assert told["fused"]
        assert told.get("own_stand_ins", 0) == (3 if found["won"] else 0)
        ids, bounds = prompt((4, 5, 3), 2)
        exact = ask(client, ids, bounds, 8, canopy_recompute_ratio=1.0)
        assert report(exact)["fused"]
        assert exact["output_ids"] == ask(client, ids, "off", 8)["output_ids"]
        other = ask(client, *prompt((3, 4, 5), 3), 1, extra_key="another tenant")
        assert report(other)["unknown_chunks"] == 3
        delete(client, name)
        assert state(client)["stand_ins"]["chunks"] == 0
        assert state(client)["stand_ins"]["in_force"] == 0
        learn(client, [(3, 4, 5)])
        told = report(ask(client, *prompt((3, 5, 4), 4), 1))
        assert told["fused"], "encoded behind the neutral ones"
        assert "own_stand_ins" not in told
        assert state(client)["fallbacks"] == 0


def delete(client, name: str) -> None:
    import urllib.request

    asked = urllib.request.Request(f"{client.url}/canopy/chunks/{name}", method="DELETE")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.loads(answer.read())["deleted"] == name


@pytest.mark.long
def test_where_nothing_stands_in_the_server_refuses_to_start(server, tiny_model) -> None:
    with pytest.raises(Exception, match="needs --canopy-chunk-encode standin or mixed"):  # noqa: SIM117
        with server(tiny_model, "--canopy-chunks", "on", "--canopy-chunk-stand-in", "corpus"):
            pass
