"""``canopy compile``: the simulator as machine code, for plans that take half the time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from canopy_lab.compiled.build import build, remove
from canopy_lab.compiled.finder import SWITCH
from canopy_lab.compiled.modules import MODULES
from sglang_canopy.declared import declare


@dataclass(frozen=True, slots=True)
class Options:
    remove: bool = declare(
        False, "--remove",
        "delete what was compiled, of other versions too, and simulate in Python again",
    )  # fmt: skip


OPTIONS = (Options,)


def run(args: Options) -> int:
    """Compile, or delete what was compiled."""
    if args.remove:
        count = remove()
        print(f"deleted {count} compiled version{'' if count == 1 else 's'}")
        return 0
    started = time.perf_counter()
    into, new = build()
    what = f"compiled {len(MODULES)} modules in {time.perf_counter() - started:.0f} s into"
    print(f"{what if new else 'compiled already:'} {into}")
    print(f"plan, simulate system and validate use it; {SWITCH}=off simulates in Python")
    return 0
