"""The usage of SGLang's own classes reports the reuse of documents, whole and streamed."""

import asyncio
import json

import pytest

pytest.importorskip("sglang")
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.entrypoints.openai.usage_processor import UsageProcessor

from canopy_chunks.plugin import usage as documents_usage

FUSED = {"fused": True, "reused": 111, "recomputed": 20, "ratio": 0.15, "stand_in_tokens": 142}
MORE = {**FUSED, "ratio": 0.3, "stand_in_tokens": 565}
OF_PROMPT = {"ratio": 0.15, "stand_in_tokens": 142}
NORMAL = {"fused": False, "why": "too few of its documents are stored"}


def answer(report=None, cached=7, index=0):
    meta = {"prompt_tokens": 200, "completion_tokens": 2, "cached_tokens": cached}
    return {"index": index, "meta_info": meta | ({"canopy_chunks": [report]} if report else {})}


def passed(*parts):
    """Return the output for the manager's answers ``parts``."""

    async def answers():
        for part in parts:
            yield part

    async def collect():
        return [part async for part in documents_usage.with_reports(answers())]

    return asyncio.run(collect())


def sent(usage):
    """Return the usage that a client of a chat receives."""
    whole = protocol.ChatCompletionResponse(id="a", model="m", choices=[], usage=usage)
    return json.loads(whole.model_dump_json())["usage"]


def of_answers(answers, n_choices=1, report=False):
    usage = UsageProcessor.calculate_response_usage(answers, n_choices, enable_cache_report=report)
    documents_usage.of_answers(usage, answers, n_choices)
    return usage


@pytest.mark.parametrize("report", [False, True])
def test_usage_has_reused_tokens_next_to_cached_tokens(report) -> None:
    [answers] = passed([answer(FUSED)])
    assert sent(of_answers(answers, report=report))["prompt_tokens_details"] == {
        "cached_tokens": 7,
        "canopy_documents": {
            "reused_tokens": 111,
            "recomputed_tokens": 20,
            "kept_tokens": 0,
            **OF_PROMPT,
        },
    }


def test_the_answer_has_the_reason_for_no_reuse() -> None:
    [answers] = passed([answer(NORMAL)])
    told = sent(of_answers(answers))["prompt_tokens_details"]["canopy_documents"]
    assert told == {
        "reused_tokens": 0,
        "recomputed_tokens": 0,
        "kept_tokens": 0,
        "why": NORMAL["why"],
    }


def test_a_prompt_without_documents_has_sglangs_own_usage() -> None:
    [answers] = passed([answer()])
    assert sent(of_answers(answers))["prompt_tokens_details"] is None


def test_a_prompt_counts_once_and_not_for_each_of_its_choices() -> None:
    [answers] = passed([answer(FUSED), answer(FUSED), answer(NORMAL), answer(NORMAL)])
    told = sent(of_answers(answers, n_choices=2))["prompt_tokens_details"]
    assert told["cached_tokens"] == 14
    assert told["canopy_documents"]["reused_tokens"] == 111
    assert told["canopy_documents"]["why"] == NORMAL["why"]


@pytest.mark.parametrize("kind", ["ChatCompletionStreamResponse", "CompletionStreamResponse"])
def test_a_streams_last_part_repeats_the_first_report(kind) -> None:
    parts = passed(answer(FUSED), answer(), answer())
    cached: dict[int, int] = {}
    for part in parts:  # as SGLang's streams note them
        cached[part["index"]] = part["meta_info"]["cached_tokens"]
    usage = UsageProcessor.calculate_streaming_usage({0: 200}, {0: 0}, {0: 3}, cached, 1)
    documents_usage.of_stream(usage, cached, 1)
    last = getattr(protocol, kind)(id="a", created=1, model="m", choices=[], usage=usage)
    details = json.loads(last.model_dump_json(exclude_none=True))["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == 7
    assert details["canopy_documents"]["reused_tokens"] == 111


def test_of_several_prompts_the_least_ratio_and_stand_ins_are_reported() -> None:
    [answers] = passed([answer(MORE), answer(FUSED), answer(NORMAL)])
    told = sent(of_answers(answers))["prompt_tokens_details"]["canopy_documents"]
    assert {name: told[name] for name in OF_PROMPT} == OF_PROMPT
