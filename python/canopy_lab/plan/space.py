"""The planner's decision variables, the initial search space, and the full grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Final, Literal

from canopy_lab.plan.sizes import finer, gib_text
from sglang_canopy.config.server_settings import SGLANG_DEFAULTS
from sglang_canopy.errors import CanopyError
from sglang_canopy.policy.registry import make_policy

GROUP: Final = "group"
TTL = float | Literal["group"] | None
"""Seconds, ``None`` (no expiry), or ``"group"``: one per prefix subtree (Algorithm 2)."""

SIZES = ("dram_gib", "disk_gib", "disk_mib_s")
"""Variables that are amounts, refined between the initial values."""
_DEFAULTS: Mapping[str, Any] = SGLANG_DEFAULTS.to_json()


@dataclass(frozen=True, slots=True)
class Configuration:
    """One point of the space. DRAM is per instance; the disk too, unless its class is shared."""

    instances: int = 1
    dram_gib: float = 0.0
    disk: str | None = None
    """A class of the price list."""
    disk_gib: float = 0.0
    disk_mib_s: float = 0.0
    """Bandwidth bought separately; 0: the bandwidth included in the size."""
    ttl: TTL = None
    """TTL of blocks on the disk."""
    policy: str = "lru"
    """Policy of every tier."""
    page_size: int = _DEFAULTS["page_size"]
    """This and the next fields are SGLang's settings of these names."""
    prefetch_policy: str = _DEFAULTS["hicache_storage_prefetch_policy"]
    write_policy: str = _DEFAULTS["hicache_write_policy"]
    schedule_policy: str = _DEFAULTS["schedule_policy"]
    chunked_prefill_size: int = _DEFAULTS["chunked_prefill_size"]

    def normal(self) -> Configuration:
        """Normalise settings of absent tiers: equivalent configurations compare equal."""
        found = self
        if found.disk is None or found.disk_gib <= 0:
            found = replace(
                found, disk=None, disk_gib=0.0, disk_mib_s=0.0, ttl=None,
                prefetch_policy=_DEFAULTS["hicache_storage_prefetch_policy"],
            )  # fmt: skip
        if found.dram_gib <= 0:
            found = replace(found, write_policy=_DEFAULTS["hicache_write_policy"])
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the decision variables, as in the rows of a plan."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Configuration:
        """Make a configuration from a row; ignores fields that are no decision variables."""
        return cls(**{name: data[name] for name in cls.__slots__ if name in data})

    def label(self) -> str:
        """Return a short readable label."""
        parts = [f"{self.instances} x " if self.instances > 1 else ""]
        parts[0] += f"{gib_text(self.dram_gib)} DRAM" if self.dram_gib else "no DRAM"
        if self.disk:
            width = f" at {self.disk_mib_s:g} MiB/s" if self.disk_mib_s else ""
            parts.append(f"{gib_text(self.disk_gib)} {self.disk}{width}")
            if self.ttl is not None:
                parts.append("group TTL" if self.ttl == GROUP else f"TTL {self.ttl:g} s")
        parts += [self.policy] if self.policy != "lru" else []
        given = Configuration()
        parts += [
            f"{word} {getattr(self, name)}"
            for word, name in (
                ("pages of", "page_size"),
                ("prefetch", "prefetch_policy"),
                ("writes", "write_policy"),
                ("queue", "schedule_policy"),
                ("chunks of", "chunked_prefill_size"),
            )
            if getattr(self, name) != getattr(given, name)
        ]
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Space:
    """Initial search space: a few sizes per tier, all values of every choice.

    A search begins with the first value of each choice.
    """

    dram_gib: tuple[float, ...]
    """Ascending, from 0."""
    disk_gib: tuple[float, ...]
    """Ascending, from 0."""
    disks: tuple[str, ...]
    speeds: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """MiB/s by disk class, ascending, for classes that sell bandwidth separately."""
    least_gib: float = 0.0
    """Smaller sizes hold nothing useful, and are not tried."""
    ttls: tuple[TTL, ...] = (None,)
    instances: tuple[int, ...] = (1,)
    policy: str = "lru"
    page_sizes: tuple[int, ...] = (Configuration().page_size,)
    prefetch_policies: tuple[str, ...] = (Configuration().prefetch_policy,)
    write_policies: tuple[str, ...] = (Configuration().write_policy,)
    schedule_policies: tuple[str, ...] = (Configuration().schedule_policy,)
    chunked_prefill_sizes: tuple[int, ...] = (Configuration().chunked_prefill_size,)

    def __post_init__(self) -> None:
        for name in ("dram_gib", "disk_gib"):
            values = getattr(self, name)
            if list(values) != sorted(set(values)) or not values or values[0] != 0:
                raise CanopyError(f"{name} must be ascending sizes that begin with 0")
        for name in ("instances", *map(plural, CHOICES)):
            if not getattr(self, name):
                raise CanopyError(f"{name} must have at least one value")
        for count in self.instances:
            if type(count) is not int or not 1 <= count <= 1024:
                raise CanopyError(f"instances must be whole numbers from 1 to 1024, got {count!r}")
        make_policy(self.policy, {})

    def first_slices(self) -> list[Configuration]:
        """Return one slice per instance count and disk class, every choice at its first value."""
        disks: Sequence[str | None] = self.disks or (None,)
        choices = {name: getattr(self, plural(name))[0] for name in CHOICES}
        first = Configuration(policy=self.policy, **choices)
        return [
            replace(first, instances=n, disk=disk) for n, disk in product(self.instances, disks)
        ]

    def at(
        self, where: Configuration, dram_gib: float, disk_gib: float, mib_s: float = 0.0
    ) -> Configuration | None:
        """Return ``where`` with these sizes; ``None`` for a disk without DRAM.

        HiCache reads from storage into host memory, so a disk needs DRAM.
        """
        if disk_gib and (not dram_gib or where.disk is None):
            return None
        return replace(where, dram_gib=dram_gib, disk_gib=disk_gib, disk_mib_s=mib_s).normal()

    def widths(self, disk: str | None) -> tuple[float, ...]:
        """Return the initial bandwidths of a class; (0,) if bandwidth is not sold."""
        return self.speeds.get(disk or "", (0.0,)) or (0.0,)

    def slices(self) -> Iterator[Configuration]:
        """Yield every combination of variables that are not sizes."""
        disks: Sequence[str | None] = self.disks or (None,)
        names = ("instances", "disk", *CHOICES)
        choices = [getattr(self, plural(name)) for name in CHOICES]
        for values in product(self.instances, disks, *choices):
            yield Configuration(policy=self.policy, **dict(zip(names, values)))

    def grid(self) -> list[Configuration]:
        """Return every configuration once, in a fixed order."""
        found: dict[Configuration, None] = {}
        for where in self.slices():
            for dram, disk in product(self.dram_gib, self.disk_gib):
                for mib_s in self.widths(where.disk):
                    configuration = self.at(where, dram, disk, mib_s)
                    if configuration is not None:
                        found[configuration] = None
        return list(found)

    def count(self) -> int:
        """Return the number of configurations in ``grid``."""

        def values(*names: str) -> int:
            return math.prod(len(set(getattr(self, plural(name)))) for name in names)

        disk = sum(len(self.widths(name)) for name in self.disks) * (len(self.disk_gib) - 1)
        disk *= values("ttl", "prefetch_policy")
        host = values("write_policy") * (len(self.dram_gib) - 1)
        always = values("page_size", "schedule_policy", "chunked_prefill_size")
        return len(self.instances) * always * (1 + host * (1 + disk))

    def finer(self, dram_steps: int, disk_steps: int) -> Space:
        """Add equal steps from 0 to the largest sizes: the grid to compare a search with."""
        return replace(
            self,
            dram_gib=finer(self.dram_gib, dram_steps),
            disk_gib=finer(self.disk_gib, disk_steps),
        )

    def alternatives(self, of: Configuration) -> list[Configuration]:
        """Return the configurations that differ from ``of`` in one choice, with equal sizes."""
        found: dict[Configuration, None] = {}
        steps = [replace(of, instances=n) for n in self.instances]
        if of.disk is not None:
            for disk in self.disks:
                widths = self.widths(disk)
                nearest = min(widths, key=lambda w: abs(w - of.disk_mib_s))
                steps.append(replace(of, disk=disk, disk_mib_s=nearest))
        elif of.dram_gib > 0 and len(self.disk_gib) > 1:
            first = self.first_slices()
            steps += [
                replace(of, disk=s.disk, disk_gib=self.disk_gib[1], ttl=s.ttl,
                        disk_mib_s=self.widths(s.disk)[0],
                        prefetch_policy=s.prefetch_policy)
                for s in first
                if s.disk is not None
            ]  # fmt: skip
        for name in CHOICES:
            if applies(name, of):
                steps += [replace(of, **{name: v}) for v in getattr(self, plural(name))]
        for step in steps:
            normal = step.normal()
            if normal != of:
                found[normal] = None
        return list(found)


CHOICES = (
    "ttl", "prefetch_policy", "page_size", "write_policy", "schedule_policy",
    "chunked_prefill_size",
)  # fmt: skip
"""Variables that are no amounts, in the search's order."""


def plural(name: str) -> str:
    """Return the field of ``Space`` with the values of a choice."""
    if name.endswith("policy"):
        return name.replace("policy", "policies")
    return f"{name}s"


def applies(name: str, of: Configuration) -> bool:
    """Whether a choice matters, given the tiers of ``of``."""
    if name in ("ttl", "prefetch_policy"):
        return of.disk is not None
    return name != "write_policy" or of.dram_gib > 0


def slice_of(of: Configuration) -> Configuration:
    """Return ``of`` without its sizes."""
    return replace(of, dram_gib=0.0, disk_gib=0.0, disk_mib_s=0.0)
