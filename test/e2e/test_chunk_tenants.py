"""Documents of a tenant over real HTTP: no other tenant lists, reads, pins or deletes them. The cost of
a prompt with unreadable chunks. One server, chunks on disk, windows of 128 tokens."""

import json
import urllib.error
import urllib.parse
import urllib.request

import pytest

from support.chunk_client import (
    DOCUMENT,
    SYSTEM,
    ask,
    damage,
    learn,
    on,
    prompt,
    refused,
    report,
    state,
)

WINDOW = 128
TEXT = "The keeper of the north gate is called Amalia, and she keeps the second key." * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("chunks")


@pytest.fixture
def client(shared_server, small_model, folder):
    disk = on(memory_mb=0, disk_mb=512, directory=str(folder), read_ahead_mb=0)
    windows = ("--page-size", "16", "--chunked-prefill-size", str(WINDOW))
    return shared_server(small_model, *disk, *windows, kv_tokens=8192)


def listed(client, **owner) -> set[str]:
    query = urllib.parse.urlencode(owner)
    return {d["id"] for d in json.loads(client.get(f"/canopy/chunks?{query}"))["documents"]}


def delete(client, name: str, **owner) -> dict:
    query = urllib.parse.urlencode(owner)
    asked = urllib.request.Request(f"{client.url}/canopy/chunks/{name}?{query}", method="DELETE")
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.loads(answer.read())


def generate(client, text, **body):
    return client.post(
        "/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}, **body}
    )


def answers(client, path, method, body=None) -> tuple[int, str]:
    code, text = refused(client, path, body, method)
    return code, text


OTHERS = [{}, {"cache_salt": "b"}, {"extra_key": "a"}, {"extra_key": "a", "cache_salt": "a"}]


@pytest.mark.parametrize("other", OTHERS, ids=lambda o: "+".join(o) or "public")
def test_tenants_apart_by_salt_reach_nothing_of_each_other(client, other) -> None:
    mine = {"cache_salt": "a"}
    made = client.post("/canopy/chunks", {"text": TEXT, **mine})
    name, mark = made["id"], made["mark"]
    assert name in listed(client, **mine)
    assert name not in listed(client, **other)
    query = urllib.parse.urlencode(other)
    unknown = "0" * 64
    for verb, method in (("", "DELETE"), ("/pin", "POST"), ("/unpin", "POST")):
        body = {} if method == "POST" else None
        tried = answers(client, f"/canopy/chunks/{name}{verb}?{query}", method, body)
        guess = answers(client, f"/canopy/chunks/{unknown}{verb}?{query}", method, body)
        assert tried[0] == guess[0] == 400
        assert tried[1].replace(name[:12], "") == guess[1].replace(unknown[:12], "")
    asked = {"text": f"Read {mark} now.", "sampling_params": {"max_new_tokens": 1}, **other}
    assert "no document" in refused(client, "/generate", asked)[1]
    said = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": mark}], **other}
    assert "no document" in refused(client, "/v1/chat/completions", said)[1]
    assert report(generate(client, f"Read {mark} now.", **mine))["chunks"] == 1
    own = client.post("/canopy/chunks", {"text": TEXT, **other})  # the same text is another id
    assert own["id"] != name
    assert delete(client, own["id"], **other)["deleted"] == own["id"]
    assert name in listed(client, **mine)
    assert client.post(f"/canopy/chunks/{name}/pin?cache_salt=a", {})["pinned"]
    assert delete(client, name, **mine)["kv_deleted"]


def test_a_batch_with_a_salt_for_each_prompt_expands_each_tenants_own_marks(client) -> None:
    made = [client.post("/canopy/chunks", {"text": TEXT, "cache_salt": s})["mark"] for s in "xy"]
    texts = [f"Read {mark} now." for mark in made]
    body = {"text": texts, "sampling_params": {"max_new_tokens": 1}, "cache_salt": ["x", "y"]}
    assert [report(a)["chunks"] for a in client.post("/generate", body)] == [1, 1]
    code, text = refused(client, "/generate", {**body, "cache_salt": ["y", "x"]})
    assert (code, "no document" in text) == (400, True)
    code, text = refused(client, "/generate", {**body, "cache_salt": ["x"]})
    assert (code, "cache_salt" in text) == (400, True)


def test_a_tenant_in_the_headers_is_the_tenant_and_may_not_be_contradicted(client) -> None:
    def call(path, method, body=None, **headers):
        data = json.dumps(body).encode() if body is not None else None
        headers["Content-Type"] = "application/json"
        asked = urllib.request.Request(client.url + path, data, headers, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return json.loads(answer.read())

    mine = {"X-Canopy-Cache-Salt": "head"}
    name = call("/canopy/chunks", "POST", {"text": TEXT}, **mine)["id"]
    assert name in listed(client, cache_salt="head")
    with pytest.raises(urllib.error.HTTPError) as answer:
        call(f"/canopy/chunks/{name}?cache_salt=other", "DELETE", **mine)
    assert b"several times" in answer.value.read()
    assert call(f"/canopy/chunks/{name}", "DELETE", **mine)["kv_deleted"]


def test_the_internal_route_gives_no_command_over_chunks(client) -> None:
    name = client.post("/canopy/chunks", {"text": TEXT, "cache_salt": "a"})["id"]
    asked = {"server_args": {f"canopy_chunk:delete:{name}:a": 1}}
    code, text = refused(client, "/set_internal_state", asked)
    assert (code, "/canopy/chunks" in text) == (403, True)
    assert delete(client, name, cache_salt="a")["kv_deleted"]  # it was all there


def test_public_answers_have_no_addresses_or_lengths_of_chunks(client) -> None:
    name = client.post("/canopy/chunks", {"text": TEXT, "cache_salt": "a"})["id"]
    for shown in (client.get("/server_info"), client.get("/canopy/chunks")):
        assert name not in shown
        assert '"stored"' not in shown
    delete(client, name, cache_salt="a")


def test_a_prompt_that_cannot_be_planned_is_computed_in_windows_and_cached(client, folder) -> None:
    learn(client, [(0, 1, 2, 3)])
    client.flush()
    ids, bounds = prompt((3, 1, 0, 2), 41)
    assert damage(folder)
    before = state(client)
    answer = ask(client, ids, bounds, 8)
    after = state(client)
    assert report(answer) == {"fused": False, "why": "planning failed"}
    assert after["fallbacks"] == before["fallbacks"] + 1
    assert after["most_rows"] <= WINDOW
    assert after["split_batches"] > before["split_batches"]
    again = ask(client, ids, bounds, 8)  # all of it is kept
    assert again["meta_info"]["cached_tokens"] >= SYSTEM + 4 * DOCUMENT - 16
    assert again["output_ids"] == answer["output_ids"]
    client.flush()
    assert client.generate(ids, 8)["output_ids"] == answer["output_ids"]
    learn(client, [(0, 1, 2, 3)])  # the damaged documents are encoded again
    assert report(ask(client, *prompt((2, 1, 0, 3), 42), 2))["fused"]
    assert state(client)["most_rows"] <= WINDOW
