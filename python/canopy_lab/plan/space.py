"""The planner's decision variables, the initial search space, and the full grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Final, Literal

from canopy_lab.plan.sizes import add_steps, format_gib
from sglang_canopy.config.server_settings import (
    PREFETCH_POLICIES,
    SCHEDULE_POLICIES,
    SGLANG_DEFAULTS,
    WRITE_POLICIES,
)
from sglang_canopy.policy.registry import CANOPYS_LRU

GROUP: Final = "group"
TTL = float | Literal["group"] | None
"""Seconds, ``None`` (no expiry), or ``"group"``: one per prefix subtree (Algorithm 2)."""

SIZE_FIELDS = ("dram_gib", "disk_gib", "disk_mib_s")
"""Variables that are amounts, refined between the initial values."""
_DEFAULTS: Mapping[str, Any] = SGLANG_DEFAULTS.to_json()


@dataclass(frozen=True, slots=True)
class Knob:
    """A variable that is not an amount: a choice of a configuration."""

    name: str
    """Field of ``Configuration``, and key on the command line."""
    setting: str = ""
    """Field of ``ServerSettings``; empty for none."""
    values: tuple[str, ...] = ()
    """Allowed names; empty for numbers."""
    tier: str | None = None
    """Tier without which it has no effect: ``dram_gib`` or ``disk``."""

    @property
    def default(self) -> Any:
        """Value of a configuration that does not set it."""
        return _DEFAULTS[self.setting] if self.setting else None

    def applies(self, configuration: Configuration) -> bool:
        """Return whether the choice matters, given the tiers of ``configuration``."""
        return self.tier is None or bool(getattr(configuration, self.tier))


KNOBS = (
    Knob("ttl", tier="disk"),
    Knob("prefetch_policy", "hicache_storage_prefetch_policy", PREFETCH_POLICIES, "disk"),
    Knob("page_size", "page_size"),
    Knob("write_policy", "hicache_write_policy", WRITE_POLICIES, "dram_gib"),
    Knob("schedule_policy", "schedule_policy", SCHEDULE_POLICIES),
    Knob("chunked_prefill_size", "chunked_prefill_size"),
)
"""All choices, in the search's order."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the space. DRAM is per instance; the disk too, unless its class is shared."""

    instances: int = 1
    dram_gib: float = 0.0
    disk: str | None = None
    """Name of a disk class of the price list."""
    disk_gib: float = 0.0
    disk_mib_s: float = 0.0
    """Bandwidth bought separately; 0: the bandwidth included in the size."""
    ttl: TTL = None
    """TTL of blocks on the disk."""
    policy: str = CANOPYS_LRU
    """Policy of every tier."""
    page_size: int = _DEFAULTS["page_size"]
    """This and the next fields are SGLang's settings of these names."""
    prefetch_policy: str = _DEFAULTS["hicache_storage_prefetch_policy"]
    write_policy: str = _DEFAULTS["hicache_write_policy"]
    schedule_policy: str = _DEFAULTS["schedule_policy"]
    chunked_prefill_size: int = _DEFAULTS["chunked_prefill_size"]

    def normalised(self) -> Configuration:
        """Normalise settings of absent tiers: equivalent configurations compare equal."""
        normalised = self
        if normalised.disk is None or normalised.disk_gib <= 0:
            normalised = replace(
                normalised, disk=None, disk_gib=0.0, disk_mib_s=0.0, ttl=None,
                prefetch_policy=_DEFAULTS["hicache_storage_prefetch_policy"],
            )  # fmt: skip
        if normalised.dram_gib <= 0:
            normalised = replace(normalised, write_policy=_DEFAULTS["hicache_write_policy"])
        return normalised

    def to_json(self) -> dict[str, Any]:
        """Return the decision variables, as in the rows of a plan."""
        return asdict(self)

    def label(self) -> str:
        parts = [f"{self.instances} x " if self.instances > 1 else ""]
        parts[0] += f"{format_gib(self.dram_gib)} DRAM" if self.dram_gib else "no DRAM"
        if self.disk:
            bandwidth = f" at {self.disk_mib_s:g} MiB/s" if self.disk_mib_s else ""
            parts.append(f"{format_gib(self.disk_gib)} {self.disk}{bandwidth}")
            if self.ttl is not None:
                parts.append("group TTL" if self.ttl == GROUP else f"TTL {self.ttl:g} s")
        parts += [self.policy] if self.policy != CANOPYS_LRU else []
        default = Configuration()
        parts += [
            f"{word} {getattr(self, name)}"
            for word, name in (
                ("pages of", "page_size"),
                ("prefetch", "prefetch_policy"),
                ("writes", "write_policy"),
                ("queue", "schedule_policy"),
                ("chunks of", "chunked_prefill_size"),
            )
            if getattr(self, name) != getattr(default, name)
        ]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Space:
    """Initial search space: a few sizes per tier, and choices of which the first is the start."""

    dram_gib: tuple[float, ...]
    """Ascending, from 0."""
    disk_gib: tuple[float, ...]
    """Ascending, from 0."""
    disks: tuple[str, ...]
    bandwidths_mib_s: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """MiB/s by disk class, ascending, for classes that sell bandwidth separately."""
    min_gib: float = 0.0
    """Smaller sizes are too small to be useful, and are not tried."""
    instances: tuple[int, ...] = (1,)
    policy: str = CANOPYS_LRU
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Values to try by the name of a knob; a knob without values has its default."""
    max_host_gib: float = math.inf
    """Most DRAM of all instances together."""

    def values(self, knob: Knob) -> tuple[Any, ...]:
        return self.choices.get(knob.name, (knob.default,))

    def first_slices(self) -> list[Configuration]:
        """Return one slice per instance count and disk class, every choice at its first value."""
        disks: Sequence[str | None] = self.disks or (None,)
        choices = {knob.name: self.values(knob)[0] for knob in KNOBS}
        first = Configuration(policy=self.policy, **choices)
        pairs = product(self.instances, disks)
        return [replace(first, instances=count, disk=disk) for count, disk in pairs]

    def resized(
        self, base: Configuration, dram_gib: float, disk_gib: float, mib_s: float = 0.0
    ) -> Configuration | None:
        """Return ``base`` with these sizes; ``None`` for a disk without DRAM, or if too large.

        HiCache reads from storage into host memory, so a disk needs DRAM.
        """
        if disk_gib and (not dram_gib or base.disk is None):
            return None
        sized = replace(base, dram_gib=dram_gib, disk_gib=disk_gib, disk_mib_s=mib_s).normalised()
        return sized if self.fits(sized) else None

    def fits(self, point: Configuration) -> bool:
        """Return whether the host memory of all instances is at most ``max_host_gib``."""
        return point.instances * point.dram_gib <= self.max_host_gib * (1 + 1e-9)

    def bandwidths(self, disk: str | None) -> tuple[float, ...]:
        """Return the initial bandwidths of a class; (0,) if bandwidth is not sold."""
        return self.bandwidths_mib_s.get(disk or "", (0.0,)) or (0.0,)

    def slices(self) -> Iterator[Configuration]:
        """Yield every combination of variables that are not sizes."""
        disks: Sequence[str | None] = self.disks or (None,)
        names = ("instances", "disk", *(knob.name for knob in KNOBS))
        choices = map(self.values, KNOBS)
        for values in product(self.instances, disks, *choices):
            yield Configuration(policy=self.policy, **dict(zip(names, values)))

    def grid(self) -> list[Configuration]:
        points: dict[Configuration, None] = {}
        for base in self.slices():
            for dram, disk in product(self.dram_gib, self.disk_gib):
                for mib_s in self.bandwidths(base.disk):
                    configuration = self.resized(base, dram, disk, mib_s)
                    if configuration is not None:
                        points[configuration] = None
        return list(points)

    def count(self) -> int:
        """Return the number of configurations in ``grid``."""

        def choice_count(tier: str | None) -> int:
            return math.prod(len(set(self.values(k))) for k in KNOBS if k.tier == tier)

        disk = sum(len(self.bandwidths(name)) for name in self.disks) * (len(self.disk_gib) - 1)
        disk *= choice_count("disk")
        host = choice_count("dram_gib") * (1 + disk)
        dram_counts = [
            sum(self.fits(Configuration(n, dram)) for dram in self.dram_gib[1:])
            for n in self.instances
        ]
        return choice_count(None) * sum(1 + dram_count * host for dram_count in dram_counts)

    def finer(self, dram_steps: int, disk_steps: int) -> Space:
        """Add equal steps from 0 to the largest sizes: the grid to compare a search with."""
        return replace(
            self,
            dram_gib=add_steps(self.dram_gib, dram_steps),
            disk_gib=add_steps(self.disk_gib, disk_steps),
        )

    def alternatives(self, point: Configuration) -> list[Configuration]:
        """Return the configurations one step from ``point``: another instance count or value of a knob,
        or another disk class at the nearest bandwidth (without a disk: the smallest disk)."""
        steps = [replace(point, instances=n) for n in self.instances]
        if point.disk is not None:
            for disk in self.disks:
                nearest = min(self.bandwidths(disk), key=lambda b: abs(b - point.disk_mib_s))
                steps.append(replace(point, disk=disk, disk_mib_s=nearest))
        elif point.dram_gib > 0 and len(self.disk_gib) > 1:
            slices = self.first_slices()
            steps += [
                replace(point, disk=slice_.disk, disk_gib=self.disk_gib[1], ttl=slice_.ttl,
                        disk_mib_s=self.bandwidths(slice_.disk)[0],
                        prefetch_policy=slice_.prefetch_policy)
                for slice_ in slices
                if slice_.disk is not None
            ]  # fmt: skip
        for knob in KNOBS:
            if knob.applies(point):
                steps += [replace(point, **{knob.name: v}) for v in self.values(knob)]
        alternatives = dict.fromkeys(step.normalised() for step in steps)
        return [c for c in alternatives if c != point and self.fits(c)]


def slice_of(configuration: Configuration) -> Configuration:
    return replace(configuration, dram_gib=0.0, disk_gib=0.0, disk_mib_s=0.0)
