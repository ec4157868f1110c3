"""Overridden methods must accept what SGLang passes; the first that does not is named."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from sglang_canopy.errors import CanopyError
from sglang_canopy.radix.cache import CanopyFullComponent, CanopyRadixCache
from sglang_canopy.radix.core import CanopyTreeCore
from sglang_canopy.radix.offset_walk import OffsetWalkCore
from sglang_canopy.radix.overrides import check_overrides
from sglang_canopy.storage.backend import CanopyStorage


def test_the_installed_sglang_fits() -> None:
    check_overrides(
        OffsetWalkCore, CanopyTreeCore, CanopyRadixCache, CanopyFullComponent, CanopyStorage
    )


def _renamed(self: Any, request_by_type: Any, tracker: Any, targets: Any = None) -> None: ...


def _one_more(
    self: Any,
    request_by_type: Any,
    tracker: Any,
    available_size_targets: Any = None,
    *,
    allocation_reclaim_satisfied: Any = None,
    reserve: int = 0,
) -> None: ...


@pytest.mark.parametrize("changed", [_renamed, _one_more])
def test_other_parameters_are_refused_with_the_methods_name(
    monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    changed.__qualname__ = "UnifiedRadixCache._evict_components"
    monkeypatch.setattr(UnifiedRadixCache, "_evict_components", changed)
    with pytest.raises(CanopyError, match=r"UnifiedRadixCache\._evict_components of this SGLang"):
        check_overrides(CanopyRadixCache)
