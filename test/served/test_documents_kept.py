"""Kept KV of documents: turns that continue from it, separate from exact KV; windows, mixed batches, retractions,
and full tiers over a restart. Aborts: test/server/scheduler/test_fuzz.py.
"""

import itertools
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.document_client import (
    DOCUMENT_TOKENS,
    ORDERS,
    QUESTION_TOKENS,
    REUSE_FLAG,
    SYSTEM_TOKENS,
    learn,
    prompt,
    query,
    report,
    reuse_flag,
    state,
    tokens,
)

pytestmark = pytest.mark.xdist_group("documents")
ANSWER_TOKENS = 6


def cached_tokens(answer) -> int:
    return answer["meta_info"]["cached_tokens"]


def conversation(client, order, field_of, **params) -> list[dict]:
    """Send three turns: two questions, then two documents as a tool's result and a third question.
    ``field_of`` maps the bounds of a turn's documents to the request's field."""
    ids, bounds = prompt(order[:2], order[0])
    answers = [query(client, ids, field_of(bounds), ANSWER_TOKENS, **params)]
    ids = ids + answers[0]["output_ids"] + tokens(QUESTION_TOKENS, 600)
    answers.append(query(client, ids, field_of(bounds), ANSWER_TOKENS, **params))
    ids = ids + answers[1]["output_ids"] + tokens(5, 601)
    for document in order[2:]:
        bounds = [*bounds, len(ids), len(ids) + DOCUMENT_TOKENS]
        ids = ids + tokens(DOCUMENT_TOKENS, document)
    ids = ids + tokens(QUESTION_TOKENS, 602)
    answers.append(query(client, ids, field_of(bounds), ANSWER_TOKENS, **params))
    answers.append(query(client, ids, field_of(bounds), ANSWER_TOKENS, **params))  # a retry
    return answers


def test_turns_retries_and_samples_continue_from_kept_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    client.flush()
    first, second, third, retry = conversation(client, (2, 0, 3, 1), lambda bounds: bounds)
    assert report(first)["fused"]
    assert (report(first)["kept"], report(first)["reused"] > 0) == (0, True)
    first_tokens = SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS + QUESTION_TOKENS
    assert cached_tokens(second) == first_tokens + ANSWER_TOKENS - 1  # without its last token
    assert (report(second)["fused"], report(second)["reused"]) == (True, 0)
    assert report(second)["kept"] == cached_tokens(second) - SYSTEM_TOKENS
    assert report(second)["computed"] == QUESTION_TOKENS + 1
    reuse = report(third)  # only the new documents are fused
    assert reuse["kept"] == cached_tokens(third) - SYSTEM_TOKENS >= first_tokens
    assert reuse["reused"] + reuse["recomputed"] == 2 * DOCUMENT_TOKENS
    assert report(retry)["computed"] == 1
    before = state(client)
    ids, bounds = prompt((1, 3, 0), 77)
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True, "n": 4}
    sampling["custom_params"] = {"canopy_document_bounds": bounds}
    samples = client.post("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert len(samples) == 4
    assert all(report(sample)["computed"] == 1 for sample in samples)
    after = state(client)
    assert after["fused_requests"] == before["fused_requests"] + 1
    assert after["kept_requests"] == before["kept_requests"] + 4


def test_exact_and_approximate_requests_never_match_each_others_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    order = (3, 1, 2, 0)
    client.flush()
    cold = conversation(client, order, lambda _: "off")
    client.flush()
    approximate = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=0.0)
    assert report(approximate[1])["kept"] > DOCUMENT_TOKENS
    assert [a["output_ids"] for a in approximate] != [a["output_ids"] for a in cold]
    exact = conversation(client, order, lambda _: "off")
    assert [cached_tokens(a) for a in exact] == [cached_tokens(a) for a in cold]
    assert [a["output_ids"] for a in exact] == [a["output_ids"] for a in cold]
    ids, bounds = prompt(order[:2], order[0])
    client.flush()
    settings = [{}, {"canopy_recompute_ratio": 0.3}]
    for params in settings:  # no KV of one setting is another's
        assert cached_tokens(query(client, ids, bounds, 1, **params)) == 0
    assert all(cached_tokens(query(client, ids, bounds, 1, **params)) for params in settings)
    assert cached_tokens(query(client, ids, bounds, 1, extra_key="another tenant")) == 0


def test_at_ratio_1_every_turn_is_plain_serving_and_shares_its_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    for order in ((1, 3, 0, 2), (2, 3, 1, 0)):
        client.flush()
        recomputed = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=1.0)
        plain = conversation(client, order, lambda _: "off")
        assert [a["output_ids"] for a in recomputed] == [a["output_ids"] for a in plain]
        assert report(recomputed[0])["fused"]
        assert report(recomputed[0])["reused"] == 0
        assert cached_tokens(plain[0]) == SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS + QUESTION_TOKENS - 1
        client.flush()
        assert [a["output_ids"] for a in recomputed] == [
            a["output_ids"] for a in conversation(client, order, lambda _: "off")
        ]


def test_documents_in_any_order_match_the_prefix_that_is_cached(client) -> None:
    client.flush()
    exact_params = {"canopy_recompute_ratio": 1.0}
    first = query(client, *prompt((2, 0, 3)), ANSWER_TOKENS, **exact_params, canopy_order="any")
    reordered = query(client, *prompt((3, 2, 0)), ANSWER_TOKENS, **exact_params, canopy_order="any")
    assert cached_tokens(reordered) == SYSTEM_TOKENS + 3 * DOCUMENT_TOKENS + QUESTION_TOKENS - 1
    assert reordered["output_ids"] == first["output_ids"]
    assert cached_tokens(query(client, *prompt((3, 2, 0)), 1, **exact_params)) == SYSTEM_TOKENS
    client.flush()
    plain = query(client, *prompt((2, 0, 3))[:1], "off", ANSWER_TOKENS)
    assert plain["output_ids"] == first["output_ids"]


RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""SGLang's own test switch: at every seventh forward that decodes, one of several requests returns
to the queue."""


def retracted_requests(client) -> int:
    """Return the number of requests that SGLang retracted, by its log."""
    counts = re.findall(r"#retracted_reqs: (\d+)", client.server.log_text())
    return sum(map(int, counts))


@pytest.fixture
def window_server(shared_server, smollm2):
    """Windows of 128 tokens, pages of 16, a pool too short for four requests, retractions."""
    arguments = ("--page-size", "16", "--chunked-prefill-size", "128")
    return shared_server(smollm2, *REUSE_FLAG, *arguments, kv_tokens=1456, environment=RETRACTING)


@pytest.mark.long
@pytest.mark.parametrize("ratio", [1.0, 0.15])
def test_answers_survive_windows_pages_and_retraction(window_server, ratio) -> None:
    learn(window_server, [(0, 1, 2, 3)])
    prompts = [prompt(order, 60 + i) for i, order in enumerate(ORDERS)]

    def send(job):
        return query(window_server, *job, 12, canopy_recompute_ratio=ratio)

    cold = [send(job)["output_ids"] for job in prompts]
    window_server.flush()  # the KV of the prompts: they are fused again
    retracted_before = retracted_requests(window_server)
    with ThreadPoolExecutor(4) as pool:  # more than fits at once
        together = list(pool.map(send, prompts))
    assert all(report(a)["fused"] for a in together)
    assert [a["output_ids"] for a in together] == cold
    assert retracted_requests(window_server) > retracted_before
    assert state(window_server)["most_rows"] <= 128
    if ratio == 1.0:
        assert cold == [query(window_server, ids, "off", 12)["output_ids"] for ids, _ in prompts]
    assert state(window_server)["fallbacks"] == 0
    assert "Traceback" not in window_server.server.log_text()


@pytest.mark.long
def test_decode_rows_and_overlap_change_no_fused_answer(server, smollm2, tmp_path) -> None:
    """SGLang's default schedule, decode rows in prefill batches, a host tier of the exact cache, documents
    on disk alone, retractions."""
    tier = ("--enable-hierarchical-cache", "--hicache-size", "1", "--page-size", "16")
    disk = reuse_flag(memory_mb=0, disk_mb=512, directory=str(tmp_path / "documents"))
    flags = ("--chunked-prefill-size", "128", "--enable-mixed-chunk", *tier, *disk)
    jobs = [prompt(order, 80 + i) for i, order in enumerate(ORDERS)]
    prompts = [tokens(100 + 30 * i, 800 + i) for i in range(3)]

    def serve(ids, output_tokens=6):  # few: alone, fused ones are retracted
        return client.generate(ids, output_tokens)

    def fuse(job):
        return query(client, *job, 16, canopy_recompute_ratio=1.0)

    with (
        server(smollm2, *flags, environment=RETRACTING, overlap=True) as client,
        ThreadPoolExecutor(7) as pool,
    ):
        learn(client, [(0, 1, 2, 3)])
        before = state(client)
        together = [pool.submit(fuse, j) for j in jobs], [pool.submit(serve, p) for p in prompts]
        fused, plain = ([f.result() for f in futures] for futures in together)
        after = state(client)
        assert after["mixed_batches"] > before["mixed_batches"]
        assert after["fallbacks"] == 0
        assert all(report(f)["fused"] and report(f)["ratio"] == 1.0 for f in fused)
        client.flush()
        assert [f["output_ids"] for f in fused] == [serve(j[0], 16)["output_ids"] for j in jobs]
        assert [s["output_ids"] for s in plain] == [serve(p)["output_ids"] for p in prompts]
        assert "Traceback" not in client.server.log_text()


DOCUMENTS = 8
TENANTS = ("a", "b")
TIER_SIZES = {"memory_mb": 16, "disk_mb": 40}
"""Of three and of nine of the sixteen documents."""
NO_TOKENIZER = "--skip-tokenizer-init"
"""Without a tokenizer there are no stand-ins: each document is exact behind the system text."""


def send_one_document(client, tenant: str, document: int, question: int) -> tuple[list[int], dict]:
    """Return the ids of a prompt of one document, and the answer with reuse."""
    ids, bounds = prompt((document,), question)
    return ids, query(client, ids, bounds, 8, extra_key=tenant)


def check_tiers(client) -> None:
    by_tier = state(client)["store"]["tiers"]
    assert set(by_tier) == {"host", "disk"}
    for tier in by_tier.values():
        assert 0 < tier["used_bytes"] <= tier["capacity_bytes"]


def send_plain(client, ids: list[int]) -> list[int]:
    return client.generate(ids, 8)["output_ids"]


@pytest.mark.long
def test_tenants_keep_their_documents_in_full_tiers_and_over_a_restart(server, smollm2, tmp_path):
    """The second start has another ratio. One document behind its own system text is exact with reuse."""
    folder, draw = tmp_path / "chunks", random.Random(7)
    options = {**TIER_SIZES, "directory": str(folder)}
    with server(smollm2, *reuse_flag(**options), NO_TOKENIZER, kv_tokens=8192) as client:
        for tenant in TENANTS:
            learn(client, [(0, 1, 2, 3), (4, 5, 6, 7)], extra_key=tenant)

        def send(turn: int) -> tuple[list[int], dict]:
            tenant = TENANTS[turn % 2]
            if turn % 4 < 2:
                return send_one_document(client, tenant, turn % DOCUMENTS, 100 + turn)
            ids, bounds = prompt(orders[turn], 100 + turn)
            return ids, query(client, ids, bounds, 8, extra_key=tenant)

        orders = [draw.sample(range(DOCUMENTS), 4) for _ in range(32)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(send, range(32)))
        reuse = [report(answer) for _, answer in answers]
        for tier in ("reused_host", "reused_disk"):
            assert sum(row.get(tier, 0) for row in reuse) > 0, tier
        assert {row["ratio"] for row in reuse if row["fused"]} == {0.15}
        one_document_answers = [answers[i] for i in range(32) if i % 4 < 2]
        assert sum(report(answer)["fused"] for _, answer in one_document_answers) > 4
        for ids, answer in one_document_answers:
            assert answer["output_ids"] == send_plain(client, ids)
        _, other_answer = send_one_document(client, "c", 0, 200)
        assert not report(other_answer)["fused"]
        assert state(client)["fallbacks"] == 0
        check_tiers(client)
        assert "Traceback" not in client.server.log_text()

    with server(smollm2, *reuse_flag(**options, ratio=0.3), NO_TOKENIZER, kv_tokens=8192) as client:
        _, other_answer = send_one_document(client, "d", 0, 300)  # "c" has stored its own by now
        assert not report(other_answer)["fused"]
        before = state(client)
        pairs = itertools.product(TENANTS, range(DOCUMENTS))
        answers_after_restart = [send_one_document(client, *pair, 310) for pair in pairs]
        fused = [answer for _, answer in answers_after_restart if report(answer)["fused"]]
        assert fused
        assert all(report(answer)["ratio"] == 0.3 for answer in fused)
        assert sum(report(answer)["reused_disk"] for answer in fused) > 0
        for ids, answer in answers_after_restart:
            assert answer["output_ids"] == send_plain(client, ids)
        assert state(client)["fallbacks"] == before["fallbacks"] == 0
        check_tiers(client)
        assert "Traceback" not in client.server.log_text()
