"""A model split over two processes makes the choices and results of the whole model."""

import dataclasses
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from comparators.weights import from_transformers  # noqa: E402

from canopy_chunks.fuse.cache import dense_cache  # noqa: E402
from canopy_chunks.fuse.encode import encode  # noqa: E402
from canopy_chunks.fuse.fusion import fused_prefill  # noqa: E402
from canopy_chunks.fuse.rows import Stop  # noqa: E402
from canopy_chunks.fuse.selectors import make_selector  # noqa: E402
from canopy_chunks.quality.check import answers_differ  # noqa: E402
from canopy_chunks.server.options import Options, check_server  # noqa: E402
from canopy_chunks.store.chunk import FusedPrompt, Placed  # noqa: E402
from canopy_chunks.text.fields import check_selector  # noqa: E402
from sglang_canopy.errors import CanopyError  # noqa: E402
from support.chunk_models import build  # noqa: E402
from support.gloo_ranks import on_ranks  # noqa: E402

RANKS, PREFIX, CHUNK, TAIL = 2, 12, 50, 9
TRIED = ("question",)


@dataclasses.dataclass
class Gloo:
    """The ranks of this test: sums and gathers over processes."""

    embed_rows: torch.Tensor

    def sum(self, part):
        dist.all_reduce(part)
        return part

    def embed(self, ids):
        return F.embedding(ids, self.embed_rows)

    def gather(self, logits):
        parts = [torch.empty_like(logits) for _ in range(RANKS)]
        dist.all_gather(parts, logits.contiguous())
        return torch.cat(parts, dim=-1)


def split(model, rank: int):
    """One rank's part of a whole model."""
    s = model.shape
    kv, heads = s.kv_heads // RANKS, s.heads // RANKS

    def part(x, dim=0):
        return x.chunk(RANKS, dim)[rank].contiguous()

    def layer(whole):
        q, k, v = whole.qkv.split([s.heads * s.head_dim, *[s.kv_heads * s.head_dim] * 2])
        gate, up = whole.gate_up.chunk(2)
        return dataclasses.replace(
            whole,
            qkv=torch.cat([part(q), part(k), part(v)]),
            out=part(whole.out, 1),
            gate_up=torch.cat([part(gate), part(up)]),
            down=part(whole.down, 1),
        )

    return dataclasses.replace(
        model,
        shape=dataclasses.replace(s, heads=heads, kv_heads=kv),
        layers=tuple(layer(x) for x in model.layers),
        head=part(model.head),
        ranks=Gloo(model.embed),
    )


def prompt_of_three(model) -> FusedPrompt:
    """Three chunks in another order than they were cut in."""
    ids = torch.randint(0, 300, (230,), generator=torch.Generator().manual_seed(1))
    prefix = ids[:PREFIX]
    starts = range(PREFIX, PREFIX + 3 * CHUNK, CHUNK)
    chunks = [encode(model, ids[a : a + CHUNK].tolist(), prefix.tolist()) for a in starts]
    order = [chunks[i] for i in (2, 0, 1)]
    whole = torch.cat([prefix, *(torch.tensor(c.ids) for c in order), ids[-TAIL:]])
    return FusedPrompt(whole, tuple(Placed(c, PREFIX + i * CHUNK) for i, c in enumerate(order)))


def fuse(model, selector: str):
    """The rows computed and the last token's logits of a fused prompt of three chunks."""
    prompt = prompt_of_three(model)
    cache = dense_cache(model, len(prompt))
    fused = fused_prefill(model, prompt, cache, make_selector(selector), 0.2)
    return fused.rows, fused.logits


def check(model, ratio: float) -> tuple[bool, int]:
    """Return whether the prompt's answers differ, and the number of steps of the check."""
    prompt, taken = prompt_of_three(model), 0
    steps = answers_differ(
        model, prompt.ids.tolist(), lambda: prompt.placed, "question", ratio, None, Stop()
    )
    while True:
        try:
            next(steps)
        except StopIteration as done:
            return done.value, taken
        taken += 1


def checks_of_rank(rank: int) -> list[tuple[bool, int]]:
    model = split(from_transformers(build("llama")), rank)
    return [check(model, ratio) for ratio in (0.0, 1.0)]


@pytest.mark.long
def test_two_ranks_compare_the_same_answers_in_the_same_steps(llama, tmp_path) -> None:
    found = on_ranks(RANKS, checks_of_rank, tmp_path)
    assert found[0] == found[1] == [check(llama, ratio) for ratio in (0.0, 1.0)]
    assert [differs for differs, _ in found[0]] == [True, False]


def one_rank(rank: int) -> dict[str, list[list[float]]]:
    model = split(from_transformers(build("llama")), rank)
    return {name: [x.tolist() for x in fuse(model, name)] for name in TRIED}


def test_two_ranks_choose_and_compute_as_the_whole_model(llama, tmp_path) -> None:
    found = on_ranks(RANKS, one_rank, tmp_path)
    for name in TRIED:
        rows, logits = fuse(llama, name)
        assert found[0][name] == found[1][name]  # the same bits on every rank
        assert found[0][name][0] == rows.tolist(), name
        torch.testing.assert_close(torch.tensor(found[0][name][1]), logits, atol=1e-3, rtol=1e-3)


def test_tensor_parallelism_is_served_and_its_limits_are_named() -> None:
    two = SimpleNamespace(tp_size=2)
    check_server(two, Options())
    with pytest.raises(CanopyError, match="disk_mb with --tp-size above 1"):
        check_server(two, Options(disk_mb=1, directory="somewhere"))
    check_server(SimpleNamespace(tp_size=1), Options(selector="frequency"))
    with pytest.raises(CanopyError, match="'frequency' looks at one rank's own heads"):
        check_server(two, Options(selector="frequency"))
    check_selector("frequency", 1)
    check_selector("question", 2)
    with pytest.raises(CanopyError, match="--tp-size 2"):
        check_selector("frequency", 2)
