"""Turns that continue from the KV of reused documents: kept for the next turn, separate from exact KV."""

import pytest

from support.document_client import (
    DOCUMENT,
    QUESTION,
    SYSTEM,
    ask,
    learn,
    prompt,
    report,
    state,
    tokens,
)

pytestmark = pytest.mark.xdist_group("documents")
ANSWER = 6


@pytest.fixture
def client(documents_server):
    return documents_server


def cached(answer) -> int:
    return answer["meta_info"]["cached_tokens"]


def conversation(client, order, said, **params) -> list[dict]:
    """Send three turns: two questions, then two documents as a tool's result and a third question.
    ``said`` maps the bounds of a turn's documents to the request's field."""
    ids, bounds = prompt(order[:2], order[0])
    answers = [ask(client, ids, said(bounds), ANSWER, **params)]
    ids = ids + answers[0]["output_ids"] + tokens(QUESTION, 600)
    answers.append(ask(client, ids, said(bounds), ANSWER, **params))
    ids = ids + answers[1]["output_ids"] + tokens(5, 601)
    for document in order[2:]:
        bounds = [*bounds, len(ids), len(ids) + DOCUMENT]
        ids = ids + tokens(DOCUMENT, document)
    ids = ids + tokens(QUESTION, 602)
    answers.append(ask(client, ids, said(bounds), ANSWER, **params))
    answers.append(ask(client, ids, said(bounds), ANSWER, **params))  # a retry
    return answers


def test_turns_retries_and_samples_continue_from_kept_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    client.flush()
    first, second, third, retry = conversation(client, (2, 0, 3, 1), lambda bounds: bounds)
    assert report(first)["fused"]
    assert (report(first)["kept"], report(first)["reused"] > 0) == (0, True)
    asked = SYSTEM + 2 * DOCUMENT + QUESTION
    assert cached(second) == asked + ANSWER - 1  # without the last token of the answer
    assert (report(second)["fused"], report(second)["reused"]) == (True, 0)
    assert report(second)["kept"] == cached(second) - SYSTEM
    assert report(second)["computed"] == QUESTION + 1
    told = report(third)  # only the new documents are fused
    assert told["kept"] == cached(third) - SYSTEM >= asked
    assert told["reused"] + told["recomputed"] == 2 * DOCUMENT
    assert report(retry)["computed"] == 1
    before = state(client)
    ids, bounds = prompt((1, 3, 0), 77)
    sampling = {"max_new_tokens": 3, "temperature": 1.0, "ignore_eos": True, "n": 4}
    sampling["custom_params"] = {"canopy_document_bounds": bounds}
    samples = client.post("/generate", {"input_ids": ids, "sampling_params": sampling})
    assert len(samples) == 4
    assert all(report(one)["computed"] == 1 for one in samples)
    after = state(client)
    assert after["fused_requests"] == before["fused_requests"] + 1
    assert after["kept_requests"] == before["kept_requests"] + 4


def test_exact_and_approximate_requests_never_match_each_others_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    order = (3, 1, 2, 0)
    client.flush()
    clean = conversation(client, order, lambda _: "off")
    client.flush()
    poisoned = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=0.0)
    assert report(poisoned[1])["kept"] > DOCUMENT
    assert [one["output_ids"] for one in poisoned] != [one["output_ids"] for one in clean]
    exact = conversation(client, order, lambda _: "off")
    assert [cached(one) for one in exact] == [cached(one) for one in clean]
    assert [one["output_ids"] for one in exact] == [one["output_ids"] for one in clean]
    ids, bounds = prompt(order[:2], order[0])
    client.flush()
    others = [{}, {"canopy_recompute_ratio": 0.3}, {"canopy_selector": "frequency"}]
    for params in others:  # no KV of one setting is another's
        assert cached(ask(client, ids, bounds, 1, **params)) == 0
    assert all(cached(ask(client, ids, bounds, 1, **params)) for params in others)
    assert cached(ask(client, ids, bounds, 1, extra_key="another tenant")) == 0


def test_an_exact_prefix_that_saves_as_much_is_kept(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    client.flush()
    ids, bounds = prompt((1, 3), 9)
    whole = ask(client, ids, "off", 4)
    again = ask(client, ids, bounds, 4)
    assert cached(again) == len(ids) - 1
    assert again["output_ids"] == whole["output_ids"]
    assert report(again)["why"] == "its cached prefix saves as much as its stored documents"


def test_at_ratio_1_every_turn_is_plain_serving_and_shares_its_kv(client) -> None:
    learn(client, [(0, 1, 2, 3), (3, 2, 1, 0)])
    for order in ((1, 3, 0, 2), (2, 3, 1, 0)):
        client.flush()
        whole = conversation(client, order, lambda bounds: bounds, canopy_recompute_ratio=1.0)
        plain = conversation(client, order, lambda _: "off")
        assert [one["output_ids"] for one in whole] == [one["output_ids"] for one in plain]
        assert report(whole[0])["fused"]
        assert report(whole[0])["reused"] == 0
        assert cached(plain[0]) == SYSTEM + 2 * DOCUMENT + QUESTION - 1
        client.flush()
        assert [one["output_ids"] for one in whole] == [
            one["output_ids"] for one in conversation(client, order, lambda _: "off")
        ]


def test_documents_in_any_order_match_the_prefix_that_is_cached(client) -> None:
    client.flush()
    exact = {"canopy_recompute_ratio": 1.0}
    first = ask(client, *prompt((2, 0, 3)), ANSWER, **exact, canopy_order="any")
    again = ask(client, *prompt((3, 2, 0)), ANSWER, **exact, canopy_order="any")
    assert cached(again) == SYSTEM + 3 * DOCUMENT + QUESTION - 1
    assert again["output_ids"] == first["output_ids"]
    assert cached(ask(client, *prompt((3, 2, 0)), 1, **exact)) == SYSTEM  # its own order
    client.flush()
    plain = ask(client, *prompt((2, 0, 3))[:1], "off", ANSWER)
    assert plain["output_ids"] == first["output_ids"]
