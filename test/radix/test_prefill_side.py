"""Policies on a server that only prefills: another server generates the outputs, which the next turn contains."""

from array import array

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_TOKEN, Req
from sglang.srt.sampling.sampling_params import SamplingParams

from support.live_tree import LiveTree

PROMPT = list(range(100, 116))
OUTPUT = list(range(500, 508))


def returns_by_category(tree: LiveTree) -> dict[str, float]:
    """Return the learnt returns of each category that has any."""
    categories = tree.core.live.device_policy.model.categories
    return {curve.label: sum(curve.events) for curve in categories if any(curve.events)}


def serve(
    tree: LiveTree, prompt: list[int], time: float, finish_reason: object, output: list, **stamp
) -> Req:
    """Serve a request from its arrival to its end; return the scheduler's ``Req``."""
    custom_params = {"canopy": {"time": time, "category": "chat", **stamp}}
    params = SamplingParams(temperature=0, max_new_tokens=64, custom_params=custom_params)
    req = Req("r", "", array("q", prompt), params)
    tree.core.requests.register(req)
    req.output_ids = array("q", output)
    req.finished_reason = finish_reason
    tree.core.requests.report_end(req)
    tree.insert(prompt, req.canopy.request)
    return req


def serve_prefill(tree: LiveTree, prompt: list[int], time: float, **stamp) -> Req:
    """Serve a request as SGLang's prefill side: it ends with one token, and a length of 0 once its KV is sent."""
    return serve(tree, prompt, time, FINISH_LENGTH(length=0), OUTPUT[:1], **stamp)


def test_a_request_passed_to_the_decode_side_has_no_stop_reason() -> None:
    tree = LiveTree(64, "wa", {"block_tokens": 4})
    request = serve_prefill(tree, PROMPT, 1.0).canopy.request
    assert request.stop is None
    assert request.output_tokens == 0
    assert len(request.path) == len(PROMPT) // 4
    answered = serve(tree, PROMPT, 2.0, FINISH_LENGTH(length=8), OUTPUT).canopy.request
    assert (answered.stop, answered.output_tokens) == ("length", 8)


def test_the_clients_hint_of_the_end_counts() -> None:
    tree = LiveTree(64, "wa", {"block_tokens": 4})
    assert serve_prefill(tree, PROMPT, 1.0, stop="tool").canopy.request.stop == "tool"


def test_the_next_turn_that_contains_the_output_is_a_return() -> None:
    """The next turn is a return, as on a server that prefills and decodes."""
    events = {}
    for side in ("prefill", "both"):
        tree = LiveTree(128, "wa", {"block_tokens": 4})
        if side == "prefill":
            serve_prefill(tree, PROMPT, 1.0)
        else:
            serve(tree, PROMPT, 1.0, FINISH_MATCHED_TOKEN(matched=2), OUTPUT)
        next_turn = [*PROMPT, *OUTPUT, *range(900, 908)]
        serve_prefill(tree, next_turn, 6.0)
        events[side] = returns_by_category(tree)
        assert tree.match(next_turn) == len(next_turn)
    assert events["prefill"] == {"chat|-|turn1|out<64|added<512": 1.0}
    assert events["both"] == {"chat|end|turn1|out<64|added<512": 1.0}


def test_a_turn_loaded_from_the_host_is_a_return() -> None:
    tree = LiveTree(48, "wa", {"block_tokens": 4}, host_tokens=192)
    serve_prefill(tree, PROMPT, 1.0)
    for number in range(3):
        serve_prefill(tree, list(range(2000 + 100 * number, 2040 + 100 * number)), 2.0 + number)
    assert tree.match(PROMPT) == 0
    next_turn = [*PROMPT, *OUTPUT, *range(900, 908)]
    assert tree.load_back(next_turn) == len(PROMPT)
    serve_prefill(tree, next_turn, 6.0)
    assert set(returns_by_category(tree)) == {"chat|-|turn1|out<64|added<512"}
    assert tree.match(next_turn) == len(next_turn)
