"""Traces that benchmarks draw: overlays of real agents, synthetic ones, and parts of both.

Equal seeds give equal traces, ids keep their meaning, and presets meet the published numbers.
"""

import json
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from make_overlay import main as make_overlay
from overlays import overlay
from published import compare
from shared_heads import SharedHeads
from synthetic.presets import PRESETS, get_preset
from synthetic.trace import synthesise, write_trace

from canopy_lab.characterize.observe import Observation, observe
from canopy_lab.trace import agentic, open_trace
from sglang_canopy.errors import CanopyError

BLOCK_TOKENS = 4


def archive_file(name: str, tool_tokens: int, system_tokens: int, *prompts: list[int], model="m"):
    return {
        "id": name, "block_size": BLOCK_TOKENS, "tool_tokens": tool_tokens, "system_tokens": system_tokens,
        "requests": [
            {"t": float(time_s), "in": BLOCK_TOKENS * len(ids), "out": 1, "hash_ids": ids, "model": model}
            for time_s, ids in enumerate(prompts)
        ],
    }  # fmt: skip


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "c.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        for name in "abcde":
            task = archive_file(name, 0, 0, *([*range(1, length + 1)] for length in range(1, 5)))
            task["requests"].append(
                {"t": 15.0, "type": "subagent", "agent_id": "s", "requests": [
                    {"t": 1.0, "in": 6, "out": 1, "hash_ids": [9], "stop": "end_turn"}]}
            )  # fmt: skip
            task_file = tmp_path / f"{name}.json"
            task_file.write_text(json.dumps(task))
            tar.add(task_file, arcname=f"x/{name}.json")
    return path


def test_equal_seeds_give_equal_overlays_and_others_do_not(archive: Path, tmp_path: Path) -> None:
    def write_overlay(seed: int, name: str) -> bytes:
        out = tmp_path / name
        arguments = ["--archive", archive, "--conversations", 4, "--window-s", 100, "--seed", seed]
        assert make_overlay([*map(str, arguments), "-o", str(out)]) == 0
        return out.read_bytes()

    assert write_overlay(1, "1.jsonl") == write_overlay(1, "2.jsonl")
    assert write_overlay(1, "1.jsonl.gz") == write_overlay(1, "1.jsonl.gz")
    assert write_overlay(1, "1.jsonl") != write_overlay(2, "3.jsonl")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".partial")]


def test_blocks_are_unique_to_their_conversation_and_times_sorted(archive: Path) -> None:
    requests = list(overlay(archive, 12, 1000, seed=7))
    assert len(requests) == 12 * 5
    user_by_block: dict[int, str] = {}
    for request in requests:
        for block in request.blocks:
            assert user_by_block.setdefault(block, request.user or "") == request.user
    times_s = [r.time_s for r in requests]
    assert times_s == sorted(times_s)
    assert len({r.user for r in requests}) == 12
    assert {r.category for r in requests} == {"agent", "subagent"}


def share_heads(*contents: dict) -> list[list[list[int]]]:
    """Return the blocks of each file's requests after sharing; a file's own ids are in its own hundred."""
    heads, conversations = SharedHeads(), []
    for file_index, content in enumerate(contents):
        conversation = agentic.parse_conversation(content, content["id"], 1)
        ids = [100 * file_index + i for i in range(conversation.max_block_id + 1)]
        heads.share(conversation, ids)
        conversations.append([[ids[block] for block in r.blocks] for r in conversation.requests])
    return conversations


@pytest.mark.parametrize(
    ("other_file", "blocks"),
    [
        (archive_file("b", 8, 8, [1, 2, 3, 4, 5]), [[1, 2, 3, 4, 105]]),
        (archive_file("b", 8, 9, [1, 2, 3, 4, 5]), [[1, 2, 103, 104, 105]]),  # other system prompts
        (archive_file("b", 8, 8, [1, 2, 3, 4, 5], model="n"), [[101, 102, 103, 104, 105]]),
        (archive_file("b", 0, 0, [1, 2, 3]), [[101, 102, 103]]),  # an archive that does not count
        (
            archive_file("b", 8, 8, [7, 8], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 9]),
            [[107, 108], [1, 2, 3, 4], [1, 2, 3, 4, 105], [1, 109]],  # the beginning of most
        ),
    ],
)
def test_equal_counts_share_tools_and_system_prompt_and_no_more(other_file, blocks):
    assert share_heads(archive_file("a", 8, 8, [1, 2, 3, 4, 5]), other_file)[1] == blocks


@given(st.data())
def test_equal_ids_still_mean_equal_prefixes(data: st.DataObject) -> None:
    """Ids stay chained for any heads: an id always has the same id before it."""
    contents = []
    for i in range(data.draw(st.integers(2, 5))):
        ids: dict[tuple[int, ...], int] = {}
        prompts = []
        texts_of_prompt = st.lists(st.integers(0, 1), min_size=1, max_size=5)
        for texts in data.draw(st.lists(texts_of_prompt, min_size=1, max_size=5)):
            paths = [tuple(texts[: i + 1]) for i in range(len(texts))]
            prompts.append([ids.setdefault(path, len(ids) + 1) for path in paths])
        model = data.draw(st.sampled_from("mn"))
        counts = [data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))]
        contents.append(archive_file(str(i), *counts, *prompts, model=model))
        subagent = {"t": 0.5, "agent_id": "s", "tool_tokens": data.draw(st.integers(0, 10))}
        subagent["requests"] = contents[-1]["requests"][:1]
        contents[-1]["requests"].append(subagent)
    id_before: dict[int, int] = {}
    for prompts in share_heads(*contents):
        for blocks in prompts:
            for previous, block in zip([-1, *blocks], blocks, strict=False):
                assert id_before.setdefault(block, previous) == previous


def write_session(folder: Path, name: str, ids: list[int], **fields: Any) -> None:
    content = {
        "id": name, "block_size": 64, **fields,
        "requests": [{"t": 0.0, "in": 64 * len(ids), "out": 5, "stop": "end_turn", "hash_ids": ids}],
    }  # fmt: skip
    (folder / f"{name}.json").write_text(json.dumps(content))


def blocks_by_conversation(folder: Path) -> dict[str | None, tuple[int, ...]]:
    return {request.conversation: request.blocks for request in open_trace(folder, "agentic")}


def source_fields(name: str) -> dict[str, str]:
    return {"hash_id_scope": "global", "source": name}


def test_sessions_of_one_user_share_their_blocks_and_no_others(tmp_path: Path) -> None:
    write_session(tmp_path, "a", [1, 2, 3], **source_fields("ann"))
    write_session(tmp_path, "b", [1, 2, 9], **source_fields("ann"))
    write_session(tmp_path, "c", [1, 2, 3], **source_fields("bob"))
    write_session(tmp_path, "d", [1, 2, 3])
    write_session(tmp_path, "e", [1, 2, 3], hash_id_scope="local", source="ann")
    blocks_of = blocks_by_conversation(tmp_path)
    assert blocks_of["a"][:2] == blocks_of["b"][:2]
    assert blocks_of["a"][2] != blocks_of["b"][2]
    separate_blocks = [set(blocks_of[name]) for name in ("a", "c", "d", "e")]
    assert sum(map(len, separate_blocks)) == len(set.union(*separate_blocks)) == 12


def test_an_overlay_keeps_shared_blocks_and_copies_share_none(tmp_path: Path) -> None:
    write_session(tmp_path, "a", [1, 2, 3], **source_fields("ann"))
    write_session(tmp_path, "b", [1, 2, 9], **source_fields("ann"))
    blocks_of = {request.conversation: request.blocks for request in overlay(tmp_path, 4, 100.0, 1)}
    assert blocks_of["a"][:2] == blocks_of["b"][:2]
    assert blocks_of["a#2"][:2] == blocks_of["b#2"][:2]
    assert not {*blocks_of["a"]} & {*blocks_of["a#2"]}


@pytest.mark.parametrize(
    ("block", "fields", "message"),
    [
        (2, {"hash_id_scope": "global"}, "no 'source' says in which files"),
        (2, {"hash_id_scope": "team"}, "must be local or global"),
        (1 << 41, source_fields("ann"), "must be below"),
    ],
)
def test_ids_without_a_source_or_out_of_range_are_refused(tmp_path, block, fields, message):
    write_session(tmp_path, "a", [1, block], **fields)
    with pytest.raises(CanopyError, match=message):
        blocks_by_conversation(tmp_path)


def test_equal_seeds_give_equal_synthetic_traces_and_others_do_not(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.jsonl.gz" for name in "abc"]
    for path, seed in zip(paths, (1, 1, 2)):
        write_trace(path, get_preset("trace-b"), 6.0, seed)
    content, equal, other = (path.read_bytes() for path in paths)
    assert content == equal != other
    assert json.loads((tmp_path / "a.meta.json").read_text())["synthetic"] is True
    generated = [drawn.request for drawn in synthesise(get_preset("trace-b"), 6.0, 1)]
    reread = list(open_trace(paths[0], "bailian"))
    assert [(request.time_s, request.blocks, request.turn) for request in reread] == [
        (request.time_s, request.blocks, request.turn) for request in generated
    ]


@given(
    preset=st.sampled_from(sorted(PRESETS)), span_s=st.floats(1.0, 60.0), seed=st.integers(0, 10**6)
)
@example(preset="trace-b", span_s=4.0, seed=9)  # a reply to a turn from before the trace
@settings(max_examples=10)
def test_a_synthetic_trace_is_consistent(preset: str, span_s: float, seed: int) -> None:
    """Sorted, inside its length, as many blocks as the tokens need, turns in order by parent,
    equal ids only after equal prefixes."""
    last_time_s, chats, id_before = 0.0, {}, {}
    for generated in synthesise(get_preset(preset).at_rate(5.0), span_s, seed):
        request = generated.request
        assert last_time_s <= request.time_s <= span_s
        last_time_s = request.time_s
        assert len(request.blocks) == -(-request.input_tokens // 16)
        assert min(request.input_tokens, request.output_tokens) >= 1
        if request.turn == 1:
            assert generated.parent_chat_id == -1
        else:
            assert chats[generated.parent_chat_id] == (request.conversation, request.turn - 1)
        chats[generated.chat_id] = (request.conversation, request.turn)
        previous = -1
        for block in request.blocks:
            assert id_before.setdefault(block, previous) == previous
            previous = block


PUBLISHED_SPANS = {"trace-a": (86400.0, 0.5), "trace-b": (2400.0, None)}
"""Seconds and requests per second of each preset; the paper's statistics of trace A are of a day."""


@cache
def observe_preset(name: str) -> Observation:
    span_s, rate_per_s = PUBLISHED_SPANS[name]
    return observe(d.request for d in synthesise(get_preset(name).at_rate(rate_per_s), span_s, 1))


@pytest.mark.long
@pytest.mark.parametrize("name", PUBLISHED_SPANS)
def test_presets_meet_the_published_numbers(name: str) -> None:
    rows = compare(name, observe_preset(name))
    assert all(row.value is not None for row in rows)
    assert [row.name for row in rows if not row.is_met] == []
