"""The stand-in for `sgl_kernel`: two functions that work, and names that raise."""

import pytest
import torch

import sgl_kernel


def test_new_slots_are_written_to_each_requests_row():
    req_to_token = torch.zeros(4, 6, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]),
        req_to_token,
        torch.tensor([1, 0]),
        torch.tensor([3, 1]),
        torch.tensor([7, 8, 9]),
        6,
    )
    assert req_to_token.tolist() == [[9, 0, 0, 0, 0, 0], [0] * 6, [0, 7, 8, 0, 0, 0], [0] * 6]


def test_rows_move_in_every_layer_even_where_source_and_target_overlap():
    layers = [torch.arange(20.0).view(5, 4), torch.arange(20, dtype=torch.int64).view(5, 4)]
    expected = [layer.clone() for layer in layers]
    for layer in expected:
        layer[[1, 2, 3]] = layer[[0, 1, 2]]
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64),
        torch.tensor([layer.stride(0) * layer.element_size() for layer in layers]),
        torch.tensor([1, 2, 3]),
        torch.tensor([0, 1, 2]),
    )
    for layer, expected_layer in zip(layers, expected):
        assert torch.equal(layer, expected_layer)


def test_speculative_kernels_import_and_raise_when_called():
    from sgl_kernel import build_tree_kernel_efficient_cpu

    with pytest.raises(NotImplementedError, match="speculative"):
        build_tree_kernel_efficient_cpu()


def test_cuda_symbols_are_absent():
    with pytest.raises(ImportError):
        from sgl_kernel import moe_sum  # noqa: F401
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")


def test_qwens_vision_models_can_be_imported():
    """Their code imports that of Qwen's models of linear attention, which names operators."""
    import canopy_cpu as cpu

    cpu.install()
    from sglang.srt.models.qwen2_vl import Qwen2VLForConditionalGeneration
    from sglang.srt.multimodal.processors import qwen_vl

    assert Qwen2VLForConditionalGeneration in qwen_vl.QwenVLImageProcessor.models
