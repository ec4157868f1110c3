"""A profile from kernel tables: of kernels whose times are known in closed form."""

import pytest
from from_tables import main
from kernel_tables import GPU, Assumptions, KernelTables, kernel_profile

from canopy_lab.sim.model import ModelShape
from canopy_lab.sim.system.engine_profile import PUBLISHED
from sglang_canopy.errors import CanopyError

SHAPE = ModelShape(4, 1024, 16, 8, 64, 4096)
FLOPS, PAIRS, READ = 1e15, 1e13, 1e12
SIZES = (512, 1024, 2048, 4096, 8192)
"""Seconds: products by their arithmetic, prompts by pairs, steps by the bytes read."""


def attention(**row):
    return {"num_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "attn_dtype": "bfloat16",
            "kv_cache_dtype": "bfloat16", "window_size": 0, "kernel_source": "fa3", **row}  # fmt: skip


def tables(tp=1):
    heads = {"num_heads": 16 // tp, "num_key_value_heads": 8 // tp}
    return KernelTables(
        gemm=[
            {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 1000 * 2 * m * n * k / FLOPS}
            for m in (1, 256, 16384) for n in SIZES for k in SIZES
        ],
        context_attention=[
            attention(batch_size=1, isl=n, latency=1000 * n * (n + 1) / 2 / PAIRS, **heads)
            for n in (1, 1024, 4096, 16384)
        ],
        generation_attention=[
            attention(batch_size=b, isl=1, step=s, latency=1000 * b * (s + 1) / READ, **heads)
            for b in (1, 16, 256) for s in (0, 1023, 16383)
        ],
        all_reduce=[
            {"num_gpus": 2, "message_size": size, "latency": 1000 * size / 1e11}
            for size in (1024, 1 << 20, 1 << 27)
        ],
    )  # fmt: skip


def made(tp=1, parameters=1e9, **more):
    return kernel_profile(
        "test", "test", SHAPE, parameters, tables(tp), GPU("one", 80e9, 50e9), tp=tp,
        date="2026-11-22", assumed=Assumptions(step_overhead_s=0.0), **more,
    )  # fmt: skip


def test_a_step_is_the_sum_of_its_kernels():
    profile = made()
    assert profile.source == PUBLISHED
    linear = SHAPE.flops_per_token() / FLOPS
    assert profile.linear_s(2048) == pytest.approx(2048 * linear, rel=1e-3)
    pairs = 2048 * 4096 + 2048 * 2049 / 2
    assert profile.attend_s(2048, 4096) == pytest.approx(4 * pairs / PAIRS, rel=0.01)
    read = 4 * 16 * 4096 / READ
    assert profile.decode_s(16, 4096) == pytest.approx(16 * linear + read, rel=0.02)


def test_two_gpus_share_the_work_and_pay_for_talking():
    one, two = made(), made(2)
    talk = 2 * 4 * 4096 * 1024 * 2 / 1e11
    assert two.linear_s(4096) == pytest.approx(one.linear_s(4096) / 2 + talk, rel=1e-3)
    assert two.notes["gpus"] == 2
    assert two.notes["device_tokens"] > 2 * one.notes["device_tokens"]
    assert two.host.read_bytes_per_s == 2 * one.host.read_bytes_per_s


def test_a_misfit_is_reported():
    with pytest.raises(CanopyError, match="no room for KV"):
        made(parameters=40e9)
    with pytest.raises(CanopyError, match="--tp must divide"):
        made(3)
    with pytest.raises(CanopyError, match="no attention of prompts for"):
        kernel_profile("test", "test", ModelShape(4, 1024, 8, 8, 64, 4096), 1e9, tables(),
                       GPU("one", 80e9, 50e9), date="2026-11-22")  # fmt: skip


def test_the_command_names_what_is_missing(tmp_path, capsys):
    given = [
        str(tmp_path),
        "--system",
        "h100_sxm",
        "--model",
        "llama-3.1-8b",
        "--parameters",
        "8e9",
    ]
    assert main([*given, "--out", str(tmp_path / "p.json")]) == 2
    assert "no tables of 'h100_sxm'" in capsys.readouterr().err
