"""Saves and loads learnt curves as JSON, so that a server starts from an earlier run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import read_regular
from sglang_canopy.reuse.categories import OVERFLOW, ROOT, Categories
from sglang_canopy.reuse.category import Category
from sglang_canopy.reuse.survival import AGE_BINS, TOKEN_BINS

PROFILE_VERSION = 3
MAX_PROFILE_BYTES = 64 << 20
_LENGTHS = {"events": AGE_BINS, "waiting": AGE_BINS, "growth": TOKEN_BINS, "sums": 2, "lives": 2}
_MAX_COUNT = 1e15


class DamagedProfile(CanopyError):
    """A file that is not a profile, or has another version."""


def save(categories: Categories, label_kind: str, profile_share: float = 0.0) -> dict[str, Any]:
    """Return the counts behind every category's curve, without its refinements' counts. ``label_kind``:
    ``refined`` or ``type-turn``. ``profile_share``: remaining weight of a loaded profile's counts. Without
    them, a server that restarts often would lose its first profile."""
    return {
        "version": PROFILE_VERSION,
        "labels": label_kind,
        "categories": {
            category.label: _counts(category, profile_share)
            for category in categories
            if any(category.events) or any(category.waiting) or category.saved_counts is not None
        },
    }


def _counts(category: Category, profile_share: float) -> dict[str, list[float]]:
    counts = {
        "events": category.events,
        "waiting": category.waiting,
        "growth": category.growth,
        "sums": [category.gap_sum_s, category.growth_sum_tokens],
        "lives": [category.life_sum_s, category.life_count],
    }
    saved = category.saved_counts
    if saved is None:
        return {key: values[:] for key, values in counts.items()}
    return {
        key: [own + profile_share * loaded for own, loaded in zip(values, saved[key])]
        for key, values in counts.items()
    }


def load(state: Mapping[str, Any], categories: Categories, label_kind: str) -> float:
    """Load the result of ``save``; return its number of samples. All of it is checked before use.
    Labels beyond the table's bound join their nearest category. Raises ``DamagedProfile``, and
    ``CanopyError`` if the profile's categories are not of ``label_kind``."""
    check_state(state)
    if state["labels"] != label_kind:
        raise CanopyError(
            f"the profile has the categories {state['labels'][:20]!r}, the policy has {label_kind!r}: "
            "give the policy another profile, or the categories that it was saved with"
        )
    saved_categories, sample_count = state["categories"], 0.0
    for label, counts in saved_categories.items():
        features = () if label == ROOT else tuple(label.split("|"))
        category = categories.get(label) if label == OVERFLOW else categories.refine(features)
        if category.saved_counts is None:
            category.saved_counts = {key: [0.0] * size for key, size in _LENGTHS.items()}
        for key, totals in category.saved_counts.items():
            for i, value in enumerate(counts[key]):
                totals[i] += value
        sample_count += sum(counts["events"]) + sum(counts["waiting"])
    return sample_count


def check_state(state: Any) -> None:
    """Raise ``DamagedProfile`` if ``state`` is not a result of ``save``."""
    if not isinstance(state, Mapping) or state.get("version") != PROFILE_VERSION:
        raise DamagedProfile(
            f"a profile must be a JSON object with version {PROFILE_VERSION}, "
            "as a run with this version of Canopy saves it; delete it or save a new one"
        )
    saved_categories = state.get("categories")
    if not isinstance(saved_categories, Mapping) or not isinstance(state.get("labels"), str):
        raise DamagedProfile(
            "a profile must have an object 'categories' and their 'labels'; save a new one"
        )
    for label, counts in saved_categories.items():
        _check_counts(label, counts)


def _check_counts(label: Any, counts: Any) -> None:
    is_short = isinstance(label, str) and 0 < len(label) <= 512 and label.count("|") <= 8
    if not is_short or not label.isprintable():
        raise DamagedProfile(f"a profile's category must be a short name, got {str(label)[:80]!a}")
    if not isinstance(counts, Mapping):
        raise DamagedProfile(f"profile category {label!r}: must be an object of counts")
    for key, length in _LENGTHS.items():
        values = counts.get(key)
        if (
            not isinstance(values, list)
            or len(values) != length
            or not all(isinstance(n, (int, float)) and 0 <= n <= _MAX_COUNT for n in values)
        ):
            raise DamagedProfile(
                f"profile category {label!r}: {key!r} must be {length} numbers of 0 or more; "
                "save a new profile with this version"
            )


def read_profile(path: str) -> Any:
    """Return the JSON of a profile file. Raises ``DamagedProfile`` for invalid JSON, and
    ``CanopyError`` if the file cannot be read."""
    expected = "a profile must be a JSON file saved by an earlier run"
    try:
        content = read_regular(path, MAX_PROFILE_BYTES)
    except OSError as error:
        raise CanopyError(f"{expected}: {path!r}: {error}") from None
    if len(content) > MAX_PROFILE_BYTES:
        raise DamagedProfile(f"{expected}: {path!r} has more than {MAX_PROFILE_BYTES} bytes")
    try:
        return json.loads(content.decode())
    except RecursionError:
        raise DamagedProfile(f"{expected}: {path!r} is nested too deeply") from None
    except ValueError as error:
        raise DamagedProfile(f"{expected}: {path!r}: {error}") from None
