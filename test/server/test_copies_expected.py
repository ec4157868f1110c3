"""What the copies ahead hear of a scheduler's queue."""

from __future__ import annotations

from types import SimpleNamespace

from sglang_canopy.server.copies import due_tokens, expect


def req(prompt: int, found: int = 0, output: int = 0, done: int = 0):
    return SimpleNamespace(
        origin_input_ids=[0] * prompt, output_ids=[0] * output, prefix_len=found, extend_end=done
    )


def test_what_waits_is_added_up_without_what_is_on_the_device() -> None:
    assert due_tokens(None, [req(100, found=40), req(50)], 1000) == 110
    assert due_tokens(None, [req(100, output=7)], 1000) == 107


def test_a_prompt_in_its_chunks_still_needs_the_rest() -> None:
    assert due_tokens(req(5000, found=1000, done=2000), [req(50)], 10_000) == 3050


def test_no_more_is_due_than_the_next_steps_take() -> None:
    assert due_tokens(None, [req(900)] * 1000, 1000) == 3000


def test_the_tree_hears_of_it() -> None:
    heard = []
    ahead = SimpleNamespace(expect=heard.append)
    scheduler = SimpleNamespace(
        tree_cache=SimpleNamespace(tree_core=SimpleNamespace(ahead=ahead)),
        chunked_prefill_size=64,
        max_prefill_tokens=16384,
        chunked_req=None,
        waiting_queue=[req(100)],
    )
    expect(scheduler)
    scheduler.chunked_prefill_size = None  # not chunked
    scheduler.waiting_queue = [req(1000)]
    expect(scheduler)
    expect(SimpleNamespace(tree_cache=SimpleNamespace()))  # SGLang's own cache
    assert heard == [100, 1000]
