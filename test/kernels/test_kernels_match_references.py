"""Every kernel compared with its reference in torch (Triton's interpreter on a CPU, the chip on CUDA)."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from canopy_kernel import attention, lowpass, pages, rope_scatter  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("triton", "blocked") if DEVICE == "cpu" else ("triton",)
"""Backends under test: servers on a CPU use ``blocked``, servers on a chip ``triton``."""
if DEVICE == "cpu":
    import triton.knobs

    if not triton.knobs.runtime.interpret:
        pytest.skip("no CUDA, and TRITON_INTERPRET is not set", allow_module_level=True)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# (head size, heads, kv heads, dtype, page size, layout): every value of each, not the product.
CASES = [
    (64, 6, 2, torch.float32, 1, "NHD"),
    (64, 4, 4, torch.float16, 16, "HND"),
    (128, 4, 1, torch.bfloat16, 64, "NHD"),
    (128, 2, 2, torch.float32, 16, "HND"),
    (256, 2, 1, torch.float16, 16, "NHD"),
    (256, 1, 1, torch.bfloat16, 1, "HND"),
]
case_names = [f"d{d}-h{h}of{g}-{str(t)[6:]}-page{p}-{lay}" for d, h, g, t, p, lay in CASES]
every_case = pytest.mark.parametrize("case", CASES, ids=case_names)


def random_pool(slots, dim, heads, dtype, page_size, layout):
    count = -(-slots // page_size) + 2
    shape = (count, page_size, heads, dim) if layout == "NHD" else (count, heads, page_size, dim)
    return pages.view(torch.randn(shape, device=DEVICE).to(dtype), layout)


def rope_table(length, head_dim):
    angle = torch.arange(length, device=DEVICE)[:, None] * 10000.0 ** -(
        torch.arange(0, head_dim, 2, device=DEVICE) / head_dim
    )
    return torch.cat([angle.cos(), angle.sin()], -1)


def assert_close(result, expected, dtype):
    error = (result.float() - expected.float()).abs().max().item() if result.numel() else 0.0
    assert error <= TOLERANCE[dtype], f"off by {error:.2e}"


def scattered_rows(lengths, row_counts, slots_in_pool):
    """Rows of several requests over scattered slots of one pool."""
    slots = torch.randperm(slots_in_pool)[: sum(lengths)]
    positions = [torch.randperm(count)[:rows].sort()[0] for count, rows in zip(lengths, row_counts)]
    return attention.Rows(
        torch.cat(positions).to(DEVICE),
        torch.tensor([0, *torch.tensor(row_counts).cumsum(0)], dtype=torch.int32, device=DEVICE),
        slots.to(DEVICE),
        torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32, device=DEVICE),
        max(row_counts),
    )


@every_case
def test_sparse_attention_over_a_paged_batch_equals_the_reference(case):
    dim, heads, kv_heads, dtype, page_tokens, layout = case
    torch.manual_seed(dim)
    k, v = (random_pool(400, dim, kv_heads, dtype, page_tokens, layout) for _ in range(2))
    rows = scattered_rows([150, 1, 97], [41, 1, 97], 400)
    q = torch.randn(139, heads, dim, device=DEVICE).to(dtype)
    expected = attention.reference(q, k, v, rows, dim**-0.5)
    for backend in BACKENDS:
        assert_close(attention.sparse_prefill(q, k, v, rows, dim**-0.5, backend), expected, dtype)


def test_a_query_attends_to_keys_by_position_and_not_by_row():
    k, v = torch.zeros(8, 1, 1, 64, device=DEVICE), torch.zeros(8, 1, 1, 64, device=DEVICE)
    v[:, 0, 0, 0] = torch.arange(8.0)
    rows = attention.Rows.single(torch.tensor([2, 5, 7]).to(DEVICE), torch.arange(8).to(DEVICE))
    q = torch.randn(3, 1, 64, device=DEVICE)
    for backend in (*BACKENDS, "reference"):
        result = attention.sparse_prefill(q, k, v, rows, 1.0, backend)
        assert result[:, 0, 0].tolist() == pytest.approx([1.0, 2.5, 3.5])


def test_an_empty_batch_of_queries_has_an_empty_result():
    k = torch.zeros(4, 1, 1, 64, device=DEVICE)
    no_rows = torch.empty(0, dtype=torch.long, device=DEVICE)
    rows = attention.Rows.single(no_rows, torch.arange(4, device=DEVICE))
    for backend in (*BACKENDS, "reference"):
        q = torch.empty(0, 1, 64, device=DEVICE)
        assert attention.sparse_prefill(q, k, k, rows, 1.0, backend).shape == (0, 1, 64)


@every_case
@pytest.mark.parametrize("row_count", [0, 1, 37])
def test_rope_scatter_equals_the_reference(case, row_count):
    head_dim, _, heads, dtype, page_tokens, layout = case
    torch.manual_seed(row_count)
    raw_keys, v = (torch.randn(64, heads, head_dim, device=DEVICE).to(dtype) for _ in range(2))
    source = torch.randperm(64, device=DEVICE)[:row_count]
    positions = torch.randint(0, 500, (row_count,), device=DEVICE)
    slots = torch.randperm(100, device=DEVICE)[:row_count]
    pools = [random_pool(100, head_dim, heads, dtype, page_tokens, layout) for _ in range(2)]
    copies = [pool.clone() for pool in pools]
    args = (raw_keys, v, source, positions, slots, rope_table(500, head_dim))
    rope_scatter.reference(*args, *copies)
    rope_scatter.rope_scatter_triton(*args, *pools)
    for result, expected in zip(pools, copies):
        assert_close(result, expected, dtype)


@every_case
def test_rope_scatter_reads_rows_of_several_chunks_in_place(case):
    head_dim, _, heads, dtype, page_tokens, layout = case
    torch.manual_seed(page_tokens)
    counts = [3, 0, 21, 9]
    keys, values = (
        [torch.randn(30 + i, heads, head_dim, device=DEVICE).to(dtype) for i in range(4)]
        for _ in range(2)
    )
    chosen_rows = [torch.randperm(30)[:row_count].sort()[0] for row_count in counts]
    source = torch.cat(chosen_rows).to(DEVICE)
    positions = torch.randint(0, 500, (33,), device=DEVICE)
    slots = torch.randperm(100, device=DEVICE)[:33]
    pools = [random_pool(100, head_dim, heads, dtype, page_tokens, layout) for _ in range(2)]
    copies = [pool.clone() for pool in pools]
    common_arguments = (positions, slots, rope_table(500, head_dim))
    joined_kv = [torch.cat([kv[i] for kv, i in zip(each, chosen_rows)]) for each in (keys, values)]
    rope_scatter.reference(*joined_kv, torch.arange(33, device=DEVICE), *common_arguments, *copies)
    kernel = rope_scatter.scatter_of_layer(keys, values, counts, source, *common_arguments, *pools)
    kernel.launch(0, 1)
    for result, expected in zip(pools, copies):
        assert_close(result, expected, dtype)


@pytest.mark.parametrize("max_blocks", [None, 1, 40])
@pytest.mark.parametrize("layer_ranges", [[(0, 5)], [(0, 1), (1, 4), (4, 5)]])
def test_all_layers_of_several_chunks_are_written_in_a_launch_or_a_few(layer_ranges, max_blocks):
    dim, heads, layers, counts = 64, 2, 5, [3, 0, 17]
    keys, values = (
        [torch.randn(layers, 20 + i, heads, dim, device=DEVICE) for i in range(3)] for _ in range(2)
    )
    rows = [torch.randperm(20)[:row_count].sort()[0] for row_count in counts]
    k_pools, v_pools = (
        [random_pool(60, dim, heads, torch.float32, 16, "NHD") for _ in range(layers)]
        for _ in range(2)
    )
    slots, positions = (torch.randperm(60, device=DEVICE)[:20] for _ in range(2))
    arguments = (counts, torch.cat(rows).to(DEVICE), positions, slots, rope_table(60, dim))
    copies = [[pool.clone() for pool in pools] for pools in (k_pools, v_pools)]
    rope_scatter.LayersScatter(keys, values, *arguments, *copies).reference(0, layers)
    scatter = rope_scatter.LayersScatter(keys, values, *arguments, k_pools, v_pools, max_blocks)
    for first, end in layer_ranges:
        blocks, pieces = scatter.grid(first, end)
        assert pieces == 3 * (end - first)
        assert blocks == 3 if max_blocks is None else blocks * pieces <= max(max_blocks, pieces)
        untouched = v_pools[end].clone() if end < layers else None
        scatter.launch(first, end)
        assert untouched is None or torch.equal(untouched, v_pools[end])
    for result, expected in zip((*k_pools, *v_pools), (*copies[0], *copies[1])):
        assert_close(result, expected, torch.float32)


def test_rows_of_another_type_or_layout_are_refused_by_name():
    k, v = torch.zeros(4, 2, 64), torch.zeros(4, 2, 64)
    common_arguments = (torch.arange(4),) * 3 + (rope_table(9, 64), *(kv[:, None] for kv in (k, v)))
    for values in (v.half(), torch.zeros(2, 4, 64).transpose(0, 1)):
        with pytest.raises(ValueError, match="allowed are dense rows"):
            rope_scatter.scatter_of_layer([k], [values], [4], *common_arguments).launch(0, 1)
    with pytest.raises(ValueError, match="not alike"):
        rope_scatter.scatter_of_layer([k, k], [v], [4], *common_arguments).launch(0, 1)


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_energy_equals_the_reference(tokens, dtype):
    k, v = (torch.randn(3, tokens, 192, device=DEVICE).to(dtype) for _ in range(2))
    result, expected = lowpass.energy_triton(k, v), lowpass.reference(k, v)
    assert result.shape == (3, tokens)
    assert torch.allclose(result, expected, rtol=1e-4)


def test_low_pass_keeps_a_slow_wave_and_drops_a_fast_one():
    steps = torch.arange(64.0)
    slow, fast = (2 * torch.pi * steps * cycles / 64 for cycles in (3, 30))
    waves = torch.stack([slow.sin(), fast.sin()], -1)[None]
    low_waves = lowpass.reconstruct(waves, 0.5)
    assert torch.allclose(low_waves[0, :, 0], slow.sin(), atol=1e-5)
    assert low_waves[0, :, 1].abs().max() < 1e-5
    sum_of_both = low_waves + lowpass.reconstruct(waves, 0.5, high_pass=True)
    assert torch.allclose(sum_of_both, waves, atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "width"), [(0, 24), (1, 24), (2, 24), (33, 24), (160, 24), (3001, 71)]
)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("high", [False, True])
def test_energy_layer_by_layer_is_the_reference_of_the_reconstruction(tokens, width, alpha, high):
    k, v = (torch.randn(3, tokens, width) for _ in range(2))
    expected = lowpass.reference(*(lowpass.reconstruct(kv, alpha, high) for kv in (k, v)))
    assert torch.allclose(lowpass.lowpass_energy(k, v, alpha, high), expected, atol=1e-5)


def test_every_position_in_order_is_causal_attention():
    q, k, v = torch.randn(70, 6, 64), *torch.randn(2, 70, 2, 64).unbind()
    rows = attention.Rows.single(torch.arange(70), torch.arange(70))
    expected = attention.reference(q, k[:, None], v[:, None], rows, 0.125)
    assert_close(attention.attend_causally(q, k, v, 0.125), expected, torch.float32)


@pytest.mark.parametrize(
    "positions",
    [[699], list(range(700)), list(range(0, 700, 3)), [*range(65), *range(300, 365), 699]],
    ids=["last", "all", "every-third", "runs"],
)
def test_blocks_of_queries_on_a_cpu_are_the_dense_reference(positions):
    q, k, v = torch.randn(len(positions), 6, 32), *torch.randn(2, 700, 2, 32).unbind()
    position_ids = torch.tensor(positions)
    rows = attention.Rows.single(position_ids, torch.arange(700))
    expected = attention.reference(q, k[:, None], v[:, None], rows, 0.2)
    output = attention.attend(q, k, v, attention.make_blocks(position_ids), 0.2)
    assert_close(output, expected, torch.float32)
