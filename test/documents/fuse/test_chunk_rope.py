"""RoPE undone and applied again, and the variants that are refused by name."""

from types import SimpleNamespace

import pytest
import torch

from canopy_documents.fuse.rope import rotate, rotate_into, undo_checked, unrotate
from canopy_kernel.rows import rotate_by, rotation_factors
from sglang_canopy.errors import CanopyError

from support import document_models  # noqa: F401  # isort: skip (it adds their folder to sys.path)
from comparators.plain_model import Rope, from_config


def make_rope(scaling=1.0):
    return Rope(10000.0 ** -(torch.arange(0, 64, 2) / 64), scaling)


@pytest.mark.parametrize("scaling", [1.0, 1.37])
def test_undoing_the_rotation_restores_the_raw_keys(scaling):
    keys = torch.randn(50, 2, 64)
    positions = torch.randint(0, 100_000, (50,))
    rotated = make_rope(scaling).apply(keys, positions)
    assert (undo_checked(rotated, make_rope(scaling), positions) - keys).abs().max() < 1e-5


def test_a_moved_key_is_the_key_of_the_new_position():
    keys = torch.randn(9, 1, 64)
    old_positions, new_positions = torch.arange(9) + 3, torch.arange(9) + 700
    old_keys = make_rope().apply(keys, old_positions)
    moved = make_rope().apply(make_rope().undo(old_keys, old_positions), new_positions)
    assert (moved - make_rope().apply(keys, new_positions)).abs().max() < 1e-5


def test_a_table_rounded_to_bf16_is_undone_too():
    keys = torch.randn(40, 1, 64)
    table = make_rope().table(torch.arange(40)).bfloat16()
    assert (unrotate(rotate(keys, table.float()), table) - keys).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotating_into_a_cache_writes_the_rotated_keys_only_there(dtype):
    keys, table = torch.randn(30, 2, 64).to(dtype), make_rope(1.37).table(torch.arange(30) + 11)
    pool = torch.zeros(50, 1, 2, 64, dtype=dtype)
    rotate_into(keys, rotation_factors(table, 2), pool[10:40, 0])
    tolerance = 1e-6 if dtype == torch.float32 else 2e-2  # the last bit of bf16
    assert (pool[10:40, 0].float() - rotate(keys, table).float()).abs().max() <= tolerance
    assert not pool[:10].any()
    assert not pool[40:].any()


def test_rotation_by_factors_equals_rotation_by_the_table():
    keys, table = torch.randn(30, 3, 64), make_rope(1.37).table(torch.arange(30) + 5)
    rotated = rotate_by(keys, rotation_factors(table, 3))
    torch.testing.assert_close(rotated, rotate(keys, table), atol=1e-6, rtol=1e-5)


def test_undoing_another_rotation_is_an_error():
    wrong_rope = Rope(make_rope().inv_freq, 0.0)
    with pytest.raises(RuntimeError, match="undoing RoPE"):
        undo_checked(torch.randn(4, 1, 64), wrong_rope, torch.arange(4))


def config_with(**parameters):
    head_sizes = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 2}
    return SimpleNamespace(rope_parameters=parameters, **head_sizes)


@pytest.mark.parametrize("variant", ["dynamic", "longrope", "proportional", "something-new"])
def test_a_variant_that_cannot_move_is_refused_by_name(variant):
    with pytest.raises(CanopyError, match=f"'{variant}' is not supported.*supported are default"):
        from_config(config_with(rope_type=variant, rope_theta=1e4))


def test_partial_and_multimodal_rotations_are_refused():
    with pytest.raises(CanopyError, match="three coordinates"):
        from_config(config_with(rope_type="default", mrope_section=[1, 2, 3]))
    with pytest.raises(CanopyError, match=r"only 0\.5 of each head"):
        from_config(config_with(rope_type="default", partial_rotary_factor=0.5))


def test_older_configs_name_theta_on_their_own():
    old_config = SimpleNamespace(rope_theta=500.0, hidden_size=128, num_attention_heads=2)
    assert from_config(old_config).inv_freq[1] == pytest.approx(500.0 ** -(2 / 64))
