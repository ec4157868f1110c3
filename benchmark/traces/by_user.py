"""Agents' sessions of some users of an archive, for tuning on some and judging on others.

python benchmark/traces/by_user.py --archive agents_global.tar.xz --users user4,user8 --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from canopy_lab.trace import agentic
from sglang_canopy.errors import CanopyError


def write(archive: Path, users: Iterable[str], folder: Path) -> int:
    """Write each session of ``users`` (the field ``source``) into a file of ``folder``. Return the
    number of sessions. Raises ``CanopyError`` if a user is not in the archive."""
    wanted, found = set(users), set[str]()
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, (_, text) in enumerate(agentic.documents(archive)):
        source = json.loads(text).get("source")
        if source in wanted:
            found.add(source)
            count += 1
            (folder / f"{number:06}.json").write_bytes(text)
    if missing := wanted - found:
        raise CanopyError(f"no session of {', '.join(sorted(missing))} in {archive}")
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--archive", type=Path, required=True, help="sessions with a field source each")
    add("--users", required=True, help="names, with commas between them")
    add("--out", type=Path, required=True, help="folder")
    args = parser.parse_args()
    try:
        count = write(args.archive, args.users.split(","), args.out)
    except CanopyError as error:
        print(f"by_user: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {count} sessions")
    return 0


if __name__ == "__main__":
    sys.exit(main())
