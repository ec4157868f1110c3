"""Kept KV of documents: turns that continue from it, separate from exact KV; windows, mixed
batches, retractions, and full tiers over a restart. Aborts: test/server/scheduler/test_fuzz.py."""

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
    counters_of,
    prompt_of,
    query,
    report_of,
    reuse_flag,
    send_and_encode,
    tokens,
)

pytestmark = pytest.mark.xdist_group("documents")
ANSWER_TOKENS = 6


def outputs_of(answers) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def cached_tokens(answer) -> int:
    return answer["meta_info"]["cached_tokens"]


def conversation(client, order, field_of, **params) -> list[dict]:
    """Send three turns: two questions, then two documents as a tool's result and a third question.
    ``field_of`` maps the bounds of a turn's documents to the request's field."""
    ids, bounds = prompt_of(order[:2], order[0])
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
    send_and_encode(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    client.flush()
    first, second, third, retry = conversation(client, (2, 0, 3, 1), lambda bounds: bounds)
    assert report_of(first)["fused"]
    assert (report_of(first)["kept"], report_of(first)["reused"] > 0) == (0, True)
    first_tokens = SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS + QUESTION_TOKENS
    assert cached_tokens(second) == first_tokens + ANSWER_TOKENS - 1  # without its last token
    assert (report_of(second)["fused"], report_of(second)["reused"]) == (True, 0)
    assert report_of(second)["kept"] == cached_tokens(second) - SYSTEM_TOKENS
    assert report_of(second)["computed"] == QUESTION_TOKENS + 1
    reuse = report_of(third)  # only the new documents are fused
    assert reuse["kept"] == cached_tokens(third) - SYSTEM_TOKENS >= first_tokens
    assert reuse["reused"] + reuse["recomputed"] == 2 * DOCUMENT_TOKENS
    assert report_of(retry)["computed"] == 1
    counters_before = counters_of(client)
    ids, bounds = prompt_of((1, 3, 0), 77)
    sampling_params = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True, "n": 4}
    sampling_params["custom_params"] = {"canopy_document_bounds": bounds}
    samples = client.post("/generate", {"input_ids": ids, "sampling_params": sampling_params})
    assert len(samples) == 4
    assert all(report_of(sample)["computed"] == 1 for sample in samples)
    counters = counters_of(client)
    assert counters["fused_requests"] == counters_before["fused_requests"] + 1
    assert counters["kept_requests"] == counters_before["kept_requests"] + 4


def test_exact_and_approximate_requests_never_match_each_others_kv(client) -> None:
    send_and_encode(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    order = (3, 1, 2, 0)
    client.flush()
    cold = conversation(client, order, lambda _: "off")
    client.flush()
    approximate = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=0.0)
    assert report_of(approximate[1])["kept"] > DOCUMENT_TOKENS
    assert outputs_of(approximate) != outputs_of(cold)
    exact = conversation(client, order, lambda _: "off")
    assert [cached_tokens(answer) for answer in exact] == [cached_tokens(answer) for answer in cold]
    assert outputs_of(exact) == outputs_of(cold)
    ids, bounds = prompt_of(order[:2], order[0])
    client.flush()
    settings = [{}, {"canopy_recompute_ratio": 0.3}]
    for params in settings:  # the KV of one ratio is not another's
        assert cached_tokens(query(client, ids, bounds, 1, **params)) == 0
    assert all(cached_tokens(query(client, ids, bounds, 1, **params)) for params in settings)
    assert cached_tokens(query(client, ids, bounds, 1, extra_key="another tenant")) == 0


def test_at_ratio_1_every_turn_is_plain_serving_and_shares_its_kv(client) -> None:
    send_and_encode(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    for order in ((1, 3, 0, 2), (2, 3, 1, 0)):
        client.flush()
        recomputed = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=1.0)
        plain = conversation(client, order, lambda _: "off")
        assert outputs_of(recomputed) == outputs_of(plain)
        assert report_of(recomputed[0])["fused"]
        assert report_of(recomputed[0])["reused"] == 0
        assert cached_tokens(plain[0]) == SYSTEM_TOKENS + 2 * DOCUMENT_TOKENS + QUESTION_TOKENS - 1
        client.flush()
        assert outputs_of(conversation(client, order, lambda _: "off")) == outputs_of(recomputed)


def test_documents_in_any_order_match_the_prefix_that_is_cached(client) -> None:
    client.flush()
    exact_params = {"canopy_recompute_ratio": 1.0}
    exact_any_order = {**exact_params, "canopy_order": "any"}
    first = query(client, *prompt_of((2, 0, 3)), ANSWER_TOKENS, **exact_any_order)
    reordered = query(client, *prompt_of((3, 2, 0)), ANSWER_TOKENS, **exact_any_order)
    assert cached_tokens(reordered) == SYSTEM_TOKENS + 3 * DOCUMENT_TOKENS + QUESTION_TOKENS - 1
    assert reordered["output_ids"] == first["output_ids"]
    assert cached_tokens(query(client, *prompt_of((3, 2, 0)), 1, **exact_params)) == SYSTEM_TOKENS
    client.flush()
    plain = query(client, *prompt_of((2, 0, 3))[:1], "off", ANSWER_TOKENS)
    assert plain["output_ids"] == first["output_ids"]


RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
"""SGLang's own test switch: at every seventh forward that decodes, one of several requests returns
to the queue."""


def retracted_requests(client) -> int:
    """Return the number of requests that SGLang retracted, from its log."""
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
    send_and_encode(window_server, [(0, 1, 2, 3)])
    jobs = [prompt_of(order, 60 + i) for i, order in enumerate(ORDERS)]

    def send(job):
        return query(window_server, *job, 12, canopy_recompute_ratio=ratio)

    cold = [send(job)["output_ids"] for job in jobs]
    window_server.flush()  # the KV of the prompts: they are fused again
    retracted_before = retracted_requests(window_server)
    with ThreadPoolExecutor(4) as pool:  # more than fits at once
        together = list(pool.map(send, jobs))
    assert all(report_of(answer)["fused"] for answer in together)
    assert outputs_of(together) == cold
    assert retracted_requests(window_server) > retracted_before
    assert counters_of(window_server)["most_rows"] <= 128
    if ratio == 1.0:
        assert cold == [query(window_server, ids, "off", 12)["output_ids"] for ids, _ in jobs]
    assert counters_of(window_server)["fallbacks"] == 0
    assert "Traceback" not in window_server.server.log_text()


@pytest.mark.long
def test_decode_rows_and_overlap_change_no_fused_answer(launch, smollm2, tmp_path) -> None:
    """SGLang's default schedule, decode rows in prefill batches, a host tier of the exact cache, documents
    on disk alone, retractions."""
    tier = ("--enable-hierarchical-cache", "--hicache-size", "1", "--page-size", "16")
    disk = reuse_flag(memory_mb=0, disk_mb=512, directory=str(tmp_path / "documents"))
    flags = ("--chunked-prefill-size", "128", "--enable-mixed-chunk", *tier, *disk)
    jobs = [prompt_of(order, 80 + i) for i, order in enumerate(ORDERS)]
    prompts = [tokens(100 + 30 * i, 800 + i) for i in range(3)]

    def serve(ids, output_tokens=6):  # few: alone, fused ones are retracted
        return client.generate(ids, output_tokens)

    def fuse(job):
        return query(client, *job, 16, canopy_recompute_ratio=1.0)

    with (
        launch(smollm2, *flags, environment=RETRACTING, overlap=True) as client,
        ThreadPoolExecutor(7) as pool,
    ):
        send_and_encode(client, [(0, 1, 2, 3)])
        counters_before = counters_of(client)
        fused_futures = [pool.submit(fuse, job) for job in jobs]
        plain = [future.result() for future in [pool.submit(serve, ids) for ids in prompts]]
        fused = [future.result() for future in fused_futures]
        counters = counters_of(client)
        assert counters["mixed_batches"] > counters_before["mixed_batches"]
        assert counters["fallbacks"] == 0
        assert all(report_of(a)["fused"] and report_of(a)["ratio"] == 1.0 for a in fused)
        client.flush()
        assert outputs_of(fused) == [serve(ids, 16)["output_ids"] for ids, _ in jobs]
        assert outputs_of(plain) == [serve(ids)["output_ids"] for ids in prompts]
        assert "Traceback" not in client.server.log_text()


DOCUMENT_COUNT = 8
TENANTS = ("a", "b")
TIER_SIZES = {"memory_mb": 16, "disk_mb": 40}
"""Sizes of three and of nine of the sixteen documents' KV."""
NO_TOKENIZER = "--skip-tokenizer-init"
"""Without a tokenizer no stand-in precedes a document: each is encoded behind the system text itself."""


def send_one_document(client, tenant: str, document: int, question: int) -> tuple[list[int], dict]:
    """Return the ids of a prompt of one document, and the answer with reuse."""
    ids, bounds = prompt_of((document,), question)
    return ids, query(client, ids, bounds, 8, extra_key=tenant)


def check_tiers(client) -> None:
    tiers = counters_of(client)["store"]["tiers"]
    assert set(tiers) == {"host", "disk"}
    for tier in tiers.values():
        assert 0 < tier["used_bytes"] <= tier["capacity_bytes"]


def send_plain(client, ids: list[int]) -> list[int]:
    return client.generate(ids, 8)["output_ids"]


@pytest.mark.long
def test_tenants_keep_their_documents_in_full_tiers_and_over_a_restart(launch, smollm2, tmp_path):
    """The restart has another ratio. A prompt of one document behind its own system text is exact with reuse."""
    folder, rng = tmp_path / "chunks", random.Random(7)
    options = {**TIER_SIZES, "directory": str(folder)}
    with launch(smollm2, *reuse_flag(**options), NO_TOKENIZER, kv_tokens=8192) as client:
        for tenant in TENANTS:
            send_and_encode(client, [(0, 1, 2, 3), (4, 5, 6, 7)], extra_key=tenant)

        def send(turn: int) -> tuple[list[int], dict]:
            tenant = TENANTS[turn % 2]
            if turn % 4 < 2:
                return send_one_document(client, tenant, turn % DOCUMENT_COUNT, 100 + turn)
            ids, bounds = prompt_of(orders[turn], 100 + turn)
            return ids, query(client, ids, bounds, 8, extra_key=tenant)

        orders = [rng.sample(range(DOCUMENT_COUNT), 4) for _ in range(32)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(send, range(32)))
        reports = [report_of(answer) for _, answer in answers]
        for tier in ("reused_host", "reused_disk"):
            assert sum(report.get(tier, 0) for report in reports) > 0, tier
        assert {report["ratio"] for report in reports if report["fused"]} == {0.15}
        one_document_answers = [answers[i] for i in range(32) if i % 4 < 2]
        assert sum(report_of(answer)["fused"] for _, answer in one_document_answers) > 4
        for ids, answer in one_document_answers:
            assert answer["output_ids"] == send_plain(client, ids)
        _, other_answer = send_one_document(client, "c", 0, 200)
        assert not report_of(other_answer)["fused"]
        assert counters_of(client)["fallbacks"] == 0
        check_tiers(client)
        assert "Traceback" not in client.server.log_text()

    with launch(smollm2, *reuse_flag(**options, ratio=0.3), NO_TOKENIZER, kv_tokens=8192) as client:
        _, other_answer = send_one_document(client, "d", 0, 300)  # "c" has stored its own by now
        assert not report_of(other_answer)["fused"]
        counters_before = counters_of(client)
        pairs = itertools.product(TENANTS, range(DOCUMENT_COUNT))
        answers_after_restart = [send_one_document(client, *pair, 310) for pair in pairs]
        fused = [answer for _, answer in answers_after_restart if report_of(answer)["fused"]]
        assert fused
        assert all(report_of(answer)["ratio"] == 0.3 for answer in fused)
        assert sum(report_of(answer)["reused_disk"] for answer in fused) > 0
        for ids, answer in answers_after_restart:
            assert answer["output_ids"] == send_plain(client, ids)
        assert counters_of(client)["fallbacks"] == counters_before["fallbacks"] == 0
        check_tiers(client)
        assert "Traceback" not in client.server.log_text()
