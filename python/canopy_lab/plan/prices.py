"""Hardware prices: a price list in JSON, and the cost of a configuration.

Equation 1 of Kareto (arXiv 2603.08739) is the vector of objectives (latency, throughput, cost) over
configurations x. Equation 2 is the cost C(x): GPU-hours at their price, and non-linear prices of
other resources, whose terms the paper omits. This module uses:

    C(x) = T(x) * (instances * (gpus * p_gpu + dram * p_dram) + disks * p_disk(class, size, width))
           + p_read * read + p_write * written

T(x) is the makespan of the trace in hours. Each instance has a disk, or all share one store. p_disk
has the steps and cliffs of public price lists (``disk_class.py``).
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from canopy_lab.plan.disk_class import BILLING, BoughtRate, DiskClass, PriceSteps
from sglang_canopy.errors import CanopyError

PRICE_LISTS = Path(__file__).parent / "price_lists"


@dataclass(frozen=True, slots=True)
class Prices:
    """One price list."""

    name: str
    currency: str
    gpu_per_hour: float
    dram_per_gib_hour: float
    disks: Mapping[str, DiskClass]
    gpus_per_instance: int = 1
    is_example: bool = False
    """A shipped example, to be replaced by the user's own prices."""
    sources: tuple[str, ...] = ()
    gpu: str = ""
    """GPU of ``gpu_per_hour``, as profiles name it; empty: any."""

    def disk(self, name: str) -> DiskClass:
        """Return the disk class of that name. Raises ``CanopyError`` with the list of names."""
        if name in self.disks:
            return self.disks[name]
        close = get_close_matches(name, self.disks, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise CanopyError(
            f"unknown disk class {name!r}; {self.name} has: {', '.join(self.disks)}{hint}"
        )

    def disk_count(self, disk: str, instances: int) -> int:
        """Return the number of disks for ``instances``: one each, or one if the class is shared."""
        return 1 if self.disk(disk).shared else instances

    def price_per_hour(
        self,
        *,
        instances: int,
        dram_gib: float,
        disk: str | None = None,
        disk_gib: float = 0.0,
        used_gib: float | None = None,
        mib_s: float = 0.0,
        page_bytes: float = math.inf,
    ) -> float:
        """Return the hourly part of C(x). ``dram_gib``, ``disk_gib`` and ``mib_s`` are per instance
        (of the whole store if it is shared); ``used_gib`` is the sum over all disks."""
        gpu_price = self.gpus_per_instance * self.gpu_per_hour
        dram_price = dram_gib * self.dram_per_gib_hour
        disks = 0.0
        if disk and disk_gib > 0:
            count = self.disk_count(disk, instances)
            each_gib = None if used_gib is None else used_gib / count
            disks = count * self.disk(disk).price_per_hour(disk_gib, each_gib, mib_s, page_bytes)
        return instances * (gpu_price + dram_price) + disks


def price_list_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in PRICE_LISTS.glob("*.json")))


def load_prices(name_or_path: str | Path) -> Prices:
    """Load a shipped list by name, or a file of the same format. Raises ``CanopyError``."""
    path = Path(name_or_path)
    if str(name_or_path) in price_list_names():
        path = PRICE_LISTS / f"{name_or_path}.json"
    try:
        decoded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        close = get_close_matches(str(name_or_path), price_list_names(), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise CanopyError(
            f"no price list {str(name_or_path)!r}; give a file (docs/reference/price-list.md has the format) "
            f"or one of: {', '.join(price_list_names())}{hint}"
        ) from None
    except ValueError as error:
        raise CanopyError(f"price list {str(path)!r} is not JSON ({error})") from None
    return parse_prices(decoded, str(path))


def parse_prices(decoded: Any, source: str = "price list") -> Prices:
    """Check a decoded price list. Raises ``CanopyError`` naming the wrong field."""
    fields = _Fields(decoded, source)
    fields.allow(
        "format", "version", "name", "currency", "example", "sources", "gpu", "gpu_per_hour",
        "gpus_per_instance", "dram_per_gib_hour", "disks",
    )  # fmt: skip
    if fields.get("format", "canopy-prices") != "canopy-prices" or fields.get("version", 1) != 1:
        raise CanopyError(f'{source}: must say "format": "canopy-prices", "version": 1')
    disks = _Fields(fields.get("disks", {}), f"{source}: disks")
    sources = fields.get("sources", [])
    if not isinstance(sources, list):
        raise CanopyError(f"{source}: sources must be a list")
    gpus = fields.get("gpus_per_instance", 1)
    if type(gpus) is not int or not 0 <= gpus <= 1024:
        raise CanopyError(f"{source}: gpus_per_instance must be a whole number, got {gpus!r}")
    return Prices(
        name=str(fields.get("name", Path(source).stem)),
        currency=str(fields.get("currency", "USD")),
        gpu_per_hour=fields.number("gpu_per_hour"),
        dram_per_gib_hour=fields.number("dram_per_gib_hour"),
        disks={name: _parse_disk(name, disks.get(name), source) for name in disks.names()},
        gpus_per_instance=gpus,
        is_example=bool(fields.get("example", False)),
        sources=tuple(map(_source_text, sources)),
        gpu=str(fields.get("gpu", "")),
    )


_SIZE_FIELDS = ("smallest_gib", "largest_gib", "step_gib", "read_per_gib", "write_per_gib")
_BANDWIDTH_FIELDS = ("base_mib_s", "per_gib_mib_s", "per_iops_mib_s", "most_mib_s", "write_share", "io_kib")  # fmt: skip
"""Numbers of a ``DiskClass``, which has their defaults."""


def _parse_disk(name: str, decoded: Any, source: str) -> DiskClass:
    fields = _Fields(decoded, f"{source}: disk class {name!r}")
    switches = {"shared_channel": True, "shared": False}
    fields.allow(
        *("per_gib_month", "bandwidth", "iops", "throughput", "billing", "note"),
        *(*_SIZE_FIELDS, *switches),
    )
    bandwidth = _Fields(fields.get("bandwidth", {}), f"{fields.source}: bandwidth")
    bandwidth.allow("latency_ms", *_BANDWIDTH_FIELDS)
    billing = fields.get("billing", "provisioned")
    if billing not in BILLING:
        raise CanopyError(f"{fields.source}: billing must be one of {', '.join(BILLING)}")
    default: dict[str, Any] = {f.name: f.default for f in dataclasses.fields(DiskClass)}
    numbers: dict[str, Any] = {
        **{key: fields.number(key, default[key]) for key in _SIZE_FIELDS},
        **{key: bandwidth.number(key, default[key]) for key in _BANDWIDTH_FIELDS},
        **{key: bool(fields.get(key, default_value)) for key, default_value in switches.items()},
    }
    disk = DiskClass(
        name=name,
        per_gib_month=fields.steps("per_gib_month"),
        latency_s=bandwidth.number("latency_ms", 0.0) / 1000,
        iops=_bought_rate(fields, "iops"),
        throughput=_bought_rate(fields, "throughput"),
        billing=billing,
        **numbers,
    )
    if disk.largest_gib < disk.smallest_gib:
        raise CanopyError(f"{fields.source}: largest_gib lies below smallest_gib")
    if not disk.read_bytes_per_s(disk.smallest_gib) > 0 or not disk.write_share > 0:
        raise CanopyError(
            f"{fields.source}: has no bandwidth; give bandwidth.base_mib_s or throughput"
        )
    return disk


def _bought_rate(fields: _Fields, key: str) -> BoughtRate | None:
    decoded = fields.get(key, None)
    if decoded is None:
        return None
    rate = _Fields(decoded, f"{fields.source}: {key}")
    rate.allow("amount", "most", "included", "per_month")
    minimum = rate.number("amount")
    maximum = rate.number("most", minimum)
    if maximum < minimum:
        raise CanopyError(f"{rate.source}: most ({maximum:g}) lies below amount ({minimum:g})")
    return BoughtRate(minimum, rate.number("included", 0.0), rate.steps("per_month"), maximum)


def _source_text(source: Any) -> str:
    if isinstance(source, dict):
        return ", ".join(str(source[key]) for key in ("what", "url", "date") if key in source)
    return str(source)


class _Fields:
    """Fields of one JSON object; error messages begin with ``source``."""

    def __init__(self, decoded: Any, source: str) -> None:
        if not isinstance(decoded, dict):
            raise CanopyError(f"{source}: must be a JSON object, got {type(decoded).__name__}")
        self._fields, self.source = decoded, source

    def names(self) -> list[str]:
        return list(self._fields)

    def allow(self, *names: str) -> None:
        for name in self._fields:
            if name not in names:
                close = get_close_matches(name, names, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"
                raise CanopyError(f"{self.source}: unknown field {name!r}{hint}")

    def get(self, name: str, default: Any = None) -> Any:
        return self._fields.get(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        value: Any = self._fields.get(name, default)
        is_number = type(value) in (int, float) and value >= 0
        if not is_number or (math.isinf(value) and value != default):
            raise CanopyError(f"{self.source}: {name} must be a number of 0 or more, got {value!r}")
        return float(value)

    def steps(self, name: str) -> PriceSteps:
        value = self._fields.get(name)
        if not isinstance(value, list):
            return PriceSteps(((math.inf, self.number(name)),))
        steps, previous = [], 0.0
        for index, step in enumerate(value):
            final = index == len(value) - 1
            if not (isinstance(step, list) and len(step) == 2) or (step[0] is None) != final:
                raise CanopyError(
                    f"{self.source}: {name} must be a number or [[up_to, price], ..., [null, price]]"
                )
            pair = _Fields({"up_to": math.inf if final else step[0], "price": step[1]}, self.source)
            up_to = math.inf if final else pair.number("up_to")
            if up_to <= previous:
                raise CanopyError(f"{self.source}: the steps of {name} must rise")
            steps.append((up_to, pair.number("price")))
            previous = up_to
        if not steps:
            raise CanopyError(f"{self.source}: {name} has no step")
        return PriceSteps(tuple(steps))
