"""How far off a prediction may be before what was planned is taken back."""

from __future__ import annotations

import math
from dataclasses import dataclass

from canopy_lab.plan.validate import Validation
from sglang_canopy.errors import CanopyError

_UNITS = {"mean_ttft_s": "%", "throughput_tokens_per_s": "%", "token_hit_ratio": "points"}


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest error of each, as a share; of hits as a share of the prompts' tokens.

    The defaults are the largest that Kareto reports of its simulator (arXiv 2603.08739, section
    5.4).
    """

    mean_ttft_s: float = 0.192
    throughput_tokens_per_s: float = 0.065
    token_hit_ratio: float = 0.02

    def missed(self, found: Validation) -> list[str]:
        """The limits that ``found`` misses, in words. What the log does not say is not missed."""
        words = []
        for name, unit in _UNITS.items():
            if name not in found.seen or name not in found.predicted:
                continue
            error, most = found.error(name), getattr(self, name)
            if abs(error) > most:
                said = name.removesuffix("_s").replace("_tokens_per", "").replace("_", " ")
                words.append(f"{said} is predicted {100 * error:+.1f} {unit} off, {100 * most:g} are allowed")  # fmt: skip
        return words

    def __str__(self) -> str:
        return ",".join(f"{100 * getattr(self, name):g}" for name in _UNITS)


LIMITS = Limits()


def parse_limits(text: str) -> Limits:
    """``19.2,6.5,2``: percent of mean TTFT and throughput, points of hits. Raises ``CanopyError``."""
    try:
        values = [float(part) / 100 for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) != len(_UNITS) or not all(math.isfinite(v) and v > 0 for v in values):
        raise CanopyError(
            f"--limits must be three numbers above 0, of mean TTFT, throughput and hits, such as "
            f"{LIMITS}; got {text[:60]!r}"
        )
    return Limits(*values)
