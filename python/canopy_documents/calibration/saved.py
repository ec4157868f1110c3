"""Calibrations in a file, by setting, and the ratios that a server reads from it."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

from canopy_documents.calibration.search import CostProfile
from sglang_canopy.errors import CanopyError
from sglang_canopy.private_file import read_regular, replace_file, set_aside

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 16 << 20
TIER_NAMES = {"host": "memory", "disk": "disk"}
"""Tier of the store -> tier name in the calibration file."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting of a calibration.

    model: its identity; device: the chip; dtype: of weights and KV, in torch's spelling; tp_size:
    tensor-parallel ranks; backend: the server's attention backend.
    """

    model: str
    device: str
    dtype: str
    tp_size: int
    backend: str


@dataclass(frozen=True, slots=True)
class Calibration:
    """The result for one setting and tier."""

    ratio: float
    r_min: float
    profile: CostProfile


class Calibrations:
    """Calibrations in one JSON file, by setting and tier."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @staticmethod
    def key(setting: Setting, tier: str) -> str:
        """Return a short stable name for a setting and a tier."""
        parts = [str(part) for part in (*astuple(setting), tier)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def get(self, setting: Setting, tier: str) -> Calibration | None:
        """Return the saved calibration, or None."""
        record = self._read().get(self.key(setting, tier))
        if record is None:
            return None
        return Calibration(record["ratio"], record["r_min"], CostProfile(**record["profile"]))

    def put(self, setting: Setting, tier: str, calibration: Calibration) -> None:
        """Save a calibration. The file is replaced atomically."""
        records = self._read()
        records[self.key(setting, tier)] = {**asdict(setting), "tier": tier, **asdict(calibration)}
        replace_file(self.path, json.dumps(records, indent=1, sort_keys=True) + "\n")

    def _read(self) -> dict[str, dict]:
        try:
            records = json.loads(read_regular(self.path, MAX_FILE_BYTES))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            set_aside(self.path, error)
            return {}
        if not isinstance(records, dict) or not all(map(_is_calibration, records.values())):
            set_aside(self.path, "it is no calibration file")
            return {}
        return records


def _is_calibration(record: Any) -> bool:
    """Return whether ``record`` has the form that ``put`` writes, with usable values."""
    field_names = {*Setting.__slots__, "tier", *Calibration.__slots__}
    if not isinstance(record, dict) or set(record) != field_names:
        return False
    text_fields = ("model", "device", "dtype", "backend", "tier")
    profile = record["profile"]
    return (
        all(isinstance(record[name], str) for name in text_fields)
        and type(record["tp_size"]) is int
        and all(_is_number(record[name], upper=1.0) for name in ("ratio", "r_min"))
        and isinstance(profile, dict)
        and set(profile) == set(CostProfile.__slots__)
        and all(map(_is_number, profile.values()))
    )


def _is_number(value: Any, upper: float = sys.float_info.max) -> bool:
    return type(value) in (int, float) and 0.0 <= value <= upper


def calibrated_ratios(path: str | None, setting: Setting) -> dict[str, float]:
    """Return the calibrated ratio of each tier of the store.

    Empty without a file. Raises CanopyError if the file has no ratio for this setting.
    """
    if path is None:
        return {}
    file = Calibrations(path)
    calibrations = {tier: file.get(setting, name) for tier, name in TIER_NAMES.items()}
    ratios = {tier: c.ratio for tier, c in calibrations.items() if c is not None}
    if not ratios:
        raise CanopyError(
            f"calibration {path} has nothing for this model with {setting.dtype}, --tp-size "
            f"{setting.tp_size} and --attention-backend {setting.backend} on {setting.device}; start "
            f"without it, run `canopy documents calibrate --url URL --out {path}`, or give a ratio"
        )
    logger.info("canopy: calibrated ratios %s", ratios)
    return ratios
