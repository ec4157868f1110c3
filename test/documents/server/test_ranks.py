"""A model split over two processes makes the choices and results of the whole model."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.server.options import ReuseOptions, check_server
from sglang_canopy.errors import CanopyError
from support.split_model import check_answers, fuse

ranks_group = pytest.mark.xdist_group("ranks")


@pytest.mark.long
@ranks_group
def test_two_ranks_compare_the_same_answers_in_the_same_steps(on_two_ranks, llama, tmp_path):
    first_rank, second_rank = on_two_ranks("split_model:check_two_ratios", tmp_path)
    assert first_rank == second_rank == [list(check_answers(llama, ratio)) for ratio in (0.0, 1.0)]
    assert [differs for differs, _ in first_rank] == [True, False]


@ranks_group
def test_two_ranks_choose_and_compute_as_the_whole_model(on_two_ranks, llama, tmp_path) -> None:
    first_rank, second_rank = on_two_ranks("split_model:fuse_by_question", tmp_path)
    rows, logits = fuse(llama, "question")
    assert first_rank == second_rank  # the same bits on every rank
    assert first_rank[0] == rows.tolist()
    torch.testing.assert_close(torch.tensor(first_rank[1]), logits, atol=1e-3, rtol=1e-3)


def test_tensor_parallelism_is_served_and_its_limits_are_named() -> None:
    two_ranks = SimpleNamespace(tp_size=2)
    check_server(two_ranks, ReuseOptions())
    with pytest.raises(CanopyError, match="disk_mb with --tp-size above 1"):
        check_server(two_ranks, ReuseOptions(disk_mb=1, directory="somewhere"))
    check_server(SimpleNamespace(tp_size=1), ReuseOptions(selector="frequency"))
    with pytest.raises(CanopyError, match="'frequency' looks at one rank's own heads"):
        check_server(two_ranks, ReuseOptions(selector="frequency"))
