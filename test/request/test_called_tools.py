"""Which tool an answer calls: found in tokens, kept as a small label, and worth something to `wa`."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

from canopy_lab.sim.driver import simulate
from canopy_lab.trace.record import TraceRequest
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy
from sglang_canopy.request.tools import LABELS, TOOLS_KEY, called, label_of, to_wire, wanted
from sglang_canopy.reuse.bins import age_bin
from sglang_canopy.server import entry
from support.live_tree import LiveTree, fake_req

MARKER = "<tool_call>"


class Words:
    """A tokenizer by a regular expression: a token for each match."""

    def __init__(self, pattern: str) -> None:
        self.pattern = re.compile(pattern, re.DOTALL)
        self.ids: dict[str, int] = {}

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in self.pattern.findall(text)]


MERGING = '<tool_call>|"?[a-z]+|_[a-z]+|.'
"""A quotation mark is one token with the letters behind it, as in most byte-pair encodings."""
APART = "<tool_call>|[a-z]+|_[a-z]+|."


def find(tokenizer: Words, offered: list[str], output: str) -> str | None:
    wire = to_wire(offered, tokenizer.encode)
    return called(tokenizer.encode(output), tokenizer.encode(MARKER), {TOOLS_KEY: wire, "other": 1})


NAMES = st.lists(
    st.from_regex(r"[a-z]{2,6}(_[a-z]{2,6}){0,2}", fullmatch=True).filter(
        lambda name: name not in ("name", "arguments")
    ),
    min_size=1,
    max_size=6,
    unique=True,
)


@pytest.mark.parametrize("pattern", [MERGING, APART])
@given(NAMES, st.data())
def test_the_first_tool_called_is_found_whatever_others_are_called(
    pattern: str, names: list[str], data: st.DataObject
) -> None:
    name, after = data.draw(st.sampled_from(names)), data.draw(st.sampled_from(names))
    said = f'I use {after} now. {MARKER}\n{{"name": "{name}", "arguments": {{"x": "{after}"}}}}'
    said += f'{MARKER}\n{{"name": "{after}"}}'
    assert find(Words(pattern), names, said) == label_of(name)


def test_a_name_that_another_one_begins_with_is_told_from_it() -> None:
    assert label_of("read") != label_of("read_file")
    for pattern in (MERGING, APART):
        for name in ("read", "read_file"):
            said = f'{MARKER}{{"name": "{name}"}}'
            assert find(Words(pattern), ["read", "read_file"], said) == label_of(name)


def test_without_a_call_or_a_known_name_there_is_no_label() -> None:
    words = Words(MERGING)
    assert find(words, ["look"], 'I could look, or {"name": "look"}') is None
    assert find(words, ["look"], f'{MARKER}{{"name": "other"}}') is None
    assert called([1, 2], [], {TOOLS_KEY: [1, 1, 2]}) is None
    assert called([1, 2], [1], None) is None


@given(
    st.lists(st.integers(-3, 70) | st.text(max_size=1), max_size=30) | st.integers(),
    st.lists(st.integers(0, 9), max_size=30),
)
def test_what_no_entry_has_made_is_passed_over(wire: Any, output: list[int]) -> None:
    label = called(output, [1], {TOOLS_KEY: wire})
    assert label is None or 0 <= int(label.removeprefix("tool-")) < LABELS


def test_what_is_sent_is_bounded_and_holds_no_name() -> None:
    wire = to_wire([f"tool_{n}" * 50 for n in range(500)], lambda text: list(text.encode()))
    assert len(wire) == 32 * 2 * 10
    labels = {label_of(f"made-up-{n}") for n in range(5000)}
    assert len(labels) == LABELS


def test_only_a_policy_that_asks_for_tools_is_told() -> None:
    assert wanted({"categories": "tools"})
    assert wanted('{"categories": "tools"}')
    assert not any(map(wanted, (None, {}, "{", "[1]", {"categories": "refined"})))
    assert make_policy("wa", {"categories": "tools"}).model.tools
    with pytest.raises(CanopyError, match="refined, tools or type-turn"):
        make_policy("wa", {"categories": "text"})


def asked(words: Words, monkeypatch: pytest.MonkeyPatch, told: bool) -> dict[str, Any]:
    """The custom parameters of a chat that offers two tools."""
    monkeypatch.setattr(entry, "tool_labels", told)
    tools = [{"type": "function", "function": {"name": n}} for n in ("look", "wait")]
    body = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "x"}], tools=tools
    )
    adapted = SimpleNamespace(sampling_params={}, extra_key=None, cache_salt=None, rid=None)
    serving = SimpleNamespace(
        tool_call_parser="qwen25", tokenizer_manager=SimpleNamespace(tokenizer=words)
    )
    entry.chat_converted((adapted, None), serving, body)
    return adapted.sampling_params["custom_params"]


def test_from_the_chats_tools_to_the_label_of_its_category(monkeypatch) -> None:
    words = Words(MERGING)
    assert TOOLS_KEY not in asked(words, monkeypatch, told=False)
    custom = asked(words, monkeypatch, told=True)
    labels = {}
    for categories in ("tools", "refined"):
        tree = LiveTree(256, "wa", {"categories": categories})
        req = fake_req(list(range(160)), words.encode(f'{MARKER}{{"name": "wait"}}'))
        req.sampling_params.custom_params = custom
        request = tree.core.request_of(req)
        tree.core.finish_request(req)
        assert (request.stop, request.tool) == ("tool", label_of("wait"))
        labels[categories] = request.label
    assert labels["tools"] == f"{labels['refined']}|{label_of('wait')}"


def agents(seed: int, shuffled: bool) -> list[TraceRequest]:
    """Agents that call at random a tool that returns at once and one that takes ten minutes."""
    draw = random.Random(seed)
    found: list[TraceRequest] = []
    for agent in range(60):
        now, base = draw.uniform(0, 3000), 1000 * agent
        for turn in range(1, 13):
            slow = draw.random() < 0.5
            told = draw.random() < 0.5 if shuffled else slow
            blocks = tuple(range(base, base + 4 * turn))
            found.append(
                TraceRequest(
                    now, 16 * len(blocks), 8, blocks, 16, turn=turn, conversation=str(agent),
                    stop="tool", tool=label_of("wait" if told else "look"),
                )
            )  # fmt: skip
            now += draw.uniform(500, 700) if slow else draw.uniform(1, 3)
    return sorted(found, key=lambda r: r.time_s)


def away_after_a_minute(shuffled: bool) -> dict[str, list[float]]:
    """By tool, the share of its calls that are still away after a minute: of each category with
    enough samples."""
    policy: Any = make_policy("wa", {"categories": "tools"})
    simulate(agents(1, shuffled), policy, 250)
    found: dict[str, list[float]] = {label_of(name): [] for name in ("look", "wait")}
    for category in policy.model.categories:
        tool = category.label.split("|")[-1]
        if tool in found and sum(category.all_events) > 30:
            found[tool].append(category.curve[age_bin(60.0)])
    return found


def test_how_soon_each_tool_returns_is_learnt_and_shuffled_labels_tell_nothing() -> None:
    learnt = away_after_a_minute(shuffled=False)
    assert learnt[label_of("look")]
    assert learnt[label_of("wait")]
    assert max(learnt[label_of("look")]) < 0.25
    assert min(learnt[label_of("wait")]) > 0.75
    placebo = away_after_a_minute(shuffled=True)
    everything = [share for shares in placebo.values() for share in shares]
    assert everything
    assert max(everything) - min(everything) < 0.5
