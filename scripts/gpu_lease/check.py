"""Check without a GPU what the lease would run: programs, their words, servers' flags, tests.

python scripts/gpu_lease/check.py COMMANDS      written by DRY=1 scripts/gpu_lease.sh
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = "sglang.launch_server"
RECORDER = f"""#!/usr/bin/env bash
if [[ ${{1:-}} == -m && ${{2:-}} == {LAUNCH} ]]; then shift 2; printf '%s\\n' "$@" >"$RECORDED"; fi
"""
"""A Python with every package that records the served command."""


def commands(file: Path) -> list[tuple[str, str, list[str]]]:
    """``(part or serve, name, words)``, each once."""
    lines = dict.fromkeys(file.read_text().splitlines())
    return [(kind, name, words) for kind, name, *words in (x.split("\x1f") for x in lines)]


def fault_of_program(words: Sequence[str]) -> str | None:
    """Return the fault of ``[env NAME=VALUE ...] python WORDS``; ``None`` if it would start."""
    words = list(words)
    if words[0] == "env":
        words = words[1:]
        while "=" in words[0]:
            words = words[1:]
    program, rest = words[1], words[2:]
    if program != "-m":
        return fault_of_script(ROOT / program, rest)
    return fault_of_tests(rest[1:]) if rest[0] == "pytest" else None


def fault_of_tests(words: Sequence[str]) -> str | None:
    missing = [word for word in words if word.startswith("test/") and not (ROOT / word).is_file()]
    return f"no such tests: {', '.join(missing)}" if missing else None


def fault_of_script(file: Path, words: Sequence[str]) -> str | None:
    """Import the program and have its own parser read ``words``."""
    if not file.is_file():
        return f"{file} does not exist"
    sys.path.insert(0, str(file.parent))
    printed = io.StringIO()
    try:
        spec = importlib.util.spec_from_file_location(f"lease_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        with contextlib.redirect_stderr(printed):
            spec.loader.exec_module(module)
            module.arguments(words)
    except SystemExit:
        return printed.getvalue().strip().splitlines()[-1]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        sys.path.remove(str(file.parent))
    return None


def served_words(words: Sequence[str]) -> list[str]:
    """Return the arguments that ``serve.sh`` passes to SGLang."""
    with tempfile.TemporaryDirectory() as folder:
        recorder, recorded = Path(folder, "python"), Path(folder, "words")
        recorder.write_text(RECORDER)
        recorder.chmod(0o755)
        Path(folder, "site").mkdir()
        Path(folder, "site", ".installed").touch()
        more = {"PYTHON": str(recorder), "SITE": f"{folder}/site", "RECORDED": str(recorded)}
        subprocess.run(words, env={**os.environ, **more}, check=True, capture_output=True)
        return recorded.read_text().splitlines()


def fault_of_server(words: Sequence[str]) -> str | None:
    """Return the fault that SGLang's parser or Canopy's refusals find; ``None`` if there is none."""
    from sglang_canopy.doctor import command_line
    from sglang_canopy.errors import CanopyError

    try:
        found = command_line.refused(command_line.parse(served_words(words)))
    except (CanopyError, subprocess.CalledProcessError) as error:
        return str(error)
    return "; ".join(str(one) for one in found) or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commands", type=Path)
    found = commands(parser.parse_args().commands)
    faults = 0
    for kind, name, words in found:
        fault = fault_of_program(words) if kind == "part" else fault_of_server(words)
        if fault is not None:
            faults += 1
            print(f"{kind} {name}: {fault}")
    kinds = [kind for kind, *_ in found]
    print(f"{kinds.count('part')} parts and {kinds.count('serve')} servers: {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
