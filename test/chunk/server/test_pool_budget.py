"""SGLang's own sizing of its pool leaves out what chunk reuse needs: in SGLang's scheduler."""

import pytest

from support.worker import worked


@pytest.mark.long
def test_sglangs_pool_is_smaller_by_the_reserved_memory(tiny_model) -> None:
    flags = ("--canopy-documents", "memory_mb=100,prompt_tokens=512")
    found = worked("served_rows:pool_sizes", tiny_model, *flags, patience_s=400)
    assert found["on"] == 1000
    assert found["off"] > 3000, "what was left out is more than that"
    assert "only 64 MiB are free" in found["end"]
