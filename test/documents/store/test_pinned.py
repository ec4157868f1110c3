"""Memory registered with CUDA: its size, its lifetime, and its fallbacks."""

import gc
import mmap

import pytest
import torch

from canopy_documents.store.host_memory import registered_tensor

SHAPE = (3, 1000, 2, 5)
TENSOR_BYTES = 3 * 1000 * 2 * 5 * 2


class CudaRuntime:
    """Records CUDA's calls; ``result_code``: the result of registering."""

    def __init__(self, result_code=0):
        self.calls, self.result_code = [], result_code

    def cudaHostRegister(self, address, nbytes, flags):
        self.calls.append(("register", address, nbytes, flags))
        return self.result_code

    def cudaHostUnregister(self, address):
        self.calls.append(("unregister", address))
        return 0

    def wait(self):
        self.calls.append(("wait",))


def test_the_requested_range_is_registered_from_a_page_boundary():
    runtime = CudaRuntime()
    tensor = registered_tensor(SHAPE, torch.bfloat16, runtime, runtime.wait)
    assert (tensor.shape, tensor.dtype) == (SHAPE, torch.bfloat16)
    assert runtime.calls == [("register", tensor.data_ptr(), TENSOR_BYTES, 0)]
    assert tensor.data_ptr() % mmap.PAGESIZE == 0
    assert tensor.untyped_storage().nbytes() == TENSOR_BYTES
    tensor.fill_(3)
    assert float(tensor.float().sum()) == 3 * tensor.numel()


def test_pinned_memory_is_released_after_a_wait_and_without_tensors():
    runtime = CudaRuntime()
    tensor = registered_tensor(SHAPE, torch.bfloat16, runtime, runtime.wait)
    address, view = tensor.data_ptr(), tensor[1, :10]
    del tensor
    gc.collect()
    assert len(runtime.calls) == 1
    view.fill_(1)
    del view
    gc.collect()
    assert runtime.calls[1:] == [("wait",), ("unregister", address)]


def test_memory_that_cuda_refuses_is_never_unregistered():
    runtime = CudaRuntime(result_code=2)
    with pytest.raises(RuntimeError, match="60,000 bytes failed with error 2"):
        registered_tensor(SHAPE, torch.bfloat16, runtime, runtime.wait)
    gc.collect()
    assert [name for name, *_ in runtime.calls] == ["register"]


def test_a_tensor_of_no_bytes_is_not_registered():
    runtime = CudaRuntime()
    assert registered_tensor((2, 0), torch.bfloat16, runtime, runtime.wait).numel() == 0
    assert runtime.calls == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_reports_the_tensor_as_pinned():
    from canopy_documents.store.host_memory import pinned_tensor

    assert pinned_tensor(SHAPE, torch.bfloat16).is_pinned()
