"""Small real architectures with random weights: a test of the engine needs no download."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("sglang")

from support.document_models import FAMILIES, build_model  # noqa: E402


@pytest.fixture(scope="session", params=sorted(FAMILIES))
def hf_model(request):
    return build_model(request.param)


@pytest.fixture(scope="session")
def llama():
    from comparators.weights import from_transformers

    return from_transformers(build_model("llama"))


@pytest.fixture(scope="session")
def ids():
    return torch.randint(0, 300, (230,), generator=torch.Generator().manual_seed(1))
