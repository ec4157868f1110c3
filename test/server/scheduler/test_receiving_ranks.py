"""Replicas of data-parallel attention and stages of a pipeline, over SGLang's receiver of requests.

SGLang's groups and its receiver are real, in two processes; no model computes: the page of set-ups
in the documentation states why."""

from pathlib import Path

import pytest

from support.ranks import RankRun

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("ranks"), pytest.mark.timeout(560)]


def test_dp_attention_replicas_are_separate_and_all_receive_hints(on_two_ranks, tmp_path):
    """Each has its own requests, stamps, victims, TTLs and costs; none waits for the other's."""
    first, second = on_two_ranks("receiving_ranks:dp_attention", tmp_path)
    assert len(first["times"]) > 2 * len(second["times"]) > 20
    assert first["fits"] > second["fits"] > 0, "costs are agreed on by the ranks of one replica"
    for replica in (first, second):
        assert replica["times"] == sorted(replica["times"])
        assert replica["hinted"] == first["hinted"] > 5
    assert first["victims"] != second["victims"]


def test_stages_of_a_pipeline_decide_the_same(on_two_ranks: RankRun, tmp_path: Path) -> None:
    """The first stamps, and both decide the same at the same points."""
    first_stage, second_stage = on_two_ranks("receiving_ranks:pipeline", tmp_path)
    assert first_stage == second_stage
    assert first_stage["hinted"] > 5
    assert sum(first_stage["hits"]) > 0
    assert len(set(first_stage["times"])) > 60
