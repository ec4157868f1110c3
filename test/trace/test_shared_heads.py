"""Shared blocks of an overlay's agents, against their documents."""

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from overlays import overlay
from shared_heads import SharedHeads

from canopy_lab.trace import agentic

SIZE = 4


def document(name: str, tools: int, system: int, *prompts: list[int], model: str = "m") -> dict:
    return {
        "id": name, "block_size": SIZE, "tool_tokens": tools, "system_tokens": system,
        "requests": [
            {"t": float(t), "in": SIZE * len(ids), "out": 1, "hash_ids": ids, "model": model}
            for t, ids in enumerate(prompts)
        ],
    }  # fmt: skip


def shared(*documents: dict) -> list[list[list[int]]]:
    """The blocks of each document's requests after sharing, ids of a hundred for each document."""
    heads, made = SharedHeads(), []
    for at, one in enumerate(documents):
        conversation = agentic.parse_conversation(one, one["id"], 1)
        ids = [100 * at + i for i in range(conversation.most_id + 1)]
        heads.share(conversation, ids)
        made.append([[ids[b] for b in r.blocks] for r in conversation.requests])
    return made


def test_equal_counts_share_tools_and_system_prompt_and_no_more() -> None:
    a = document("a", 8, 8, [1, 2, 3, 4, 5])
    b = document("b", 8, 8, [1, 2, 3, 4, 5])
    assert shared(a, b)[1] == [[1, 2, 3, 4, 105]]


def test_only_the_tools_are_shared_if_the_system_prompts_differ() -> None:
    a = document("a", 8, 8, [1, 2, 3, 4, 5])
    b = document("b", 8, 9, [1, 2, 3, 4, 5])
    assert shared(a, b)[1] == [[1, 2, 103, 104, 105]]


def test_a_block_that_the_tools_end_in_belongs_to_the_system_prompt() -> None:
    a, b = (document(n, 6, 6 + k, [1, 2, 3, 4]) for k, n in enumerate("ab"))
    assert shared(a, b)[1] == [[1, 102, 103, 104]]
    assert shared(a, document("c", 6, 6, [1, 2, 3, 4]))[1] == [[1, 2, 3, 104]]


def test_another_model_shares_nothing() -> None:
    a = document("a", 8, 8, [1, 2, 3, 4])
    assert shared(a, document("b", 8, 8, [1, 2, 3, 4], model="n"))[1] == [[101, 102, 103, 104]]


def test_the_head_is_the_beginning_of_most_prompts() -> None:
    a = document("a", 8, 0, [1, 2, 3])
    b = document("b", 8, 0, [7, 8], [1, 2], [1, 2, 3], [1, 9])
    assert shared(a, b)[1] == [[107, 108], [1, 2], [1, 2, 103], [1, 109]]


def test_agents_distinct_in_a_file_stay_distinct() -> None:
    one = document("a", 8, 0, [1, 2, 3])
    child = {"t": 0.5, "type": "subagent", "agent_id": "s", "tool_tokens": 8, "system_tokens": 0}
    child["requests"] = [{"t": 0.0, "in": 12, "out": 1, "hash_ids": [1, 5, 6], "model": "m"}]
    both = document("b", 8, 0, [1, 2, 3])
    both["requests"].append(child)
    assert shared(one, both)[1] == [[1, 2, 103], [1, 105, 106]]


def test_archives_that_do_not_count_share_nothing() -> None:
    silent = [document(n, 0, 0, [1, 2, 3]) for n in "ab"]
    assert shared(*silent)[1] == [[101, 102, 103]]


@given(st.data())
def test_equal_ids_still_mean_equal_prefixes(data: st.DataObject) -> None:
    """Ids stay chained for any heads: the predecessor of an id is always the same."""
    documents = []
    for at in range(data.draw(st.integers(2, 5))):
        ids: dict[tuple[int, ...], int] = {}
        prompts = []
        for texts in data.draw(
            st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=5)
        ):
            paths = [tuple(texts[: i + 1]) for i in range(len(texts))]
            prompts.append([ids.setdefault(p, len(ids) + 1) for p in paths])
        model = data.draw(st.sampled_from("mn"))
        counts = [data.draw(st.integers(0, 10)), data.draw(st.integers(0, 10))]
        documents.append(document(str(at), *counts, *prompts, model=model))
        own = {"t": 0.5, "agent_id": "s", "tool_tokens": data.draw(st.integers(0, 10))}
        own["requests"] = documents[-1]["requests"][:1]
        documents[-1]["requests"].append(own)
    before: dict[int, int] = {}
    for prompts in shared(*documents):
        for blocks in prompts:
            for previous, block in zip([-1, *blocks], blocks, strict=False):
                assert before.setdefault(block, previous) == previous


def test_agents_of_one_kind_share_their_heads_in_an_overlay(tmp_path: Path) -> None:
    archive = tmp_path / "c.tar"
    with tarfile.open(archive, "w") as tar:
        for name in "ab":
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(document(name, 8, 4, [1, 2, 3, 4])))
            tar.add(file, arcname=file.name)
    first, second = overlay(archive, 2, 10, 1)
    assert first.blocks[:3] == second.blocks[:3]
    assert first.blocks[3] != second.blocks[3]


def test_sub_agents_of_one_real_conversation_have_the_counted_heads(
    data_dir: Path,
) -> None:
    """Agents of one file of the archive, whose ids can be compared."""
    pairs = equal = 0
    for _, text in agentic.documents(data_dir / "agentic_coding/traces_500.tar.xz"):
        if b'"subagent"' not in text:
            continue
        conversation = agentic.parse_conversation(json.loads(text), "c", 1)
        kinds: dict[tuple[object, ...], list[tuple[int, ...]]] = {}
        for r in conversation.requests:
            if r.category == "subagent" and r.turn == 1:
                head = (r.tool_tokens + r.system_tokens) // r.block_tokens
                kind = (r.model, r.tool_tokens, r.system_tokens)
                kinds.setdefault(kind, []).append(r.blocks[:head])
        for heads in kinds.values():
            pairs += len(heads) - 1
            equal += sum(head == heads[0] for head in heads[1:])
    if not pairs:
        pytest.skip("no file has two sub-agents of a kind")
    assert equal == pairs
