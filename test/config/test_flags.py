"""A flag of the server refuses values outside the bounds and choices that the reference states."""

import dataclasses
from typing import Any

import pytest

from sglang_canopy.declared import declared_fields
from sglang_canopy.errors import CanopyError
from sglang_canopy.server.start.flags import FLAG_CLASSES

BOUNDED_FIELDS = [
    (flags_class, field, option)
    for flags_class in FLAG_CLASSES
    for field, option in declared_fields(flags_class)
    if option.choices or option.low is not None or option.high is not None
]


def refused_values(option: Any) -> list[Any]:
    """Return values that ``option`` does not allow."""
    if option.choices:
        return ["no such choice"]
    values = [] if option.low is None else [option.low - 1]
    return values if option.high is None else [*values, option.high + 1]


@pytest.mark.parametrize(
    ("flags_class", "field", "option"), BOUNDED_FIELDS, ids=lambda part: getattr(part, "name", "")
)
def test_a_value_outside_its_bounds_is_refused(flags_class: Any, field: Any, option: Any) -> None:
    required = {
        each.name: None
        for each in dataclasses.fields(flags_class)
        if each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING
    }
    for value in refused_values(option):
        with pytest.raises(CanopyError, match=f"{option.flag} must be"):
            flags_class(**{**required, field.name: value})
