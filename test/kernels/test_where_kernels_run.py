"""Tests compile kernels on a chip, and interpret them only without one."""

import os

import pytest

from support.chip import environment, has_cuda


def test_a_chip_is_used_and_a_machine_without_one_interprets():
    assert environment(cuda=True) == {}
    assert set(environment(cuda=False)) == {"SGLANG_USE_CPU_ENGINE", "TRITON_INTERPRET"}


def test_this_machine_is_seen_as_torch_sees_it():
    torch = pytest.importorskip("torch")
    assert has_cuda() == torch.cuda.is_available()


@pytest.mark.skipif(has_cuda(), reason="has a chip")
def test_without_a_chip_kernels_are_interpreted():
    assert os.environ["TRITON_INTERPRET"] == "1"
