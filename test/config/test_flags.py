"""A flag of the server refuses values outside the bounds and choices that the reference states."""

import dataclasses
from typing import Any

import pytest

from sglang_canopy.declared import declared_fields
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start.flags import KINDS

LIMITED = [
    (kind, field, option)
    for kind in KINDS
    for field, option in declared_fields(kind)
    if option.choices or option.low is not None or option.high is not None
]


def refused_values(option: Any) -> list[Any]:
    """Return values that ``option`` does not allow."""
    if option.choices:
        return ["no such choice"]
    values = [] if option.low is None else [option.low - 1]
    return values if option.high is None else [*values, option.high + 1]


@pytest.mark.parametrize(
    ("kind", "field", "option"), LIMITED, ids=lambda part: getattr(part, "name", "")
)
def test_a_value_outside_its_bounds_is_refused(kind: Any, field: Any, option: Any) -> None:
    required = {
        f.name: None
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }
    for value in refused_values(option):
        with pytest.raises(CanopyError, match="must be"):
            kind(**{**required, field.name: value})
