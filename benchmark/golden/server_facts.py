"""Facts from a process with SGLang: Canopy's options, and the loaded modules.

Run by ``size.py``; prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from paths import ON_A_CPU, SOURCES, use_checkout


def options() -> dict[str, bool]:
    """Options of SGLang's parser that are not there without the plugin, and whether ``--help``
    shows them; each by the first of its names."""
    from sglang.srt.server_args import ServerArgs

    def names() -> dict[str, bool]:
        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        options = [a for a in parser._actions if a.option_strings]
        return {a.option_strings[0]: a.help != argparse.SUPPRESS for a in options}

    without = names()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return {name: shown for name, shown in sorted(names().items()) if name not in without}


def loaded() -> dict[str, int]:
    """Return the lines of each loaded module of the project, without the code for CPUs."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = Path(file) if file else None
        if path is None or not any(folder in path.parents for folder in SOURCES):
            continue
        if path.suffix == ".py" and not any(folder in path.parents for folder in ON_A_CPU):
            found[name] = len(path.read_text(encoding="utf-8").splitlines())
    return found


def main() -> None:
    use_checkout()
    facts: dict[str, object] = {"options": options()}
    import torch
    from paths import model
    from way_server import SERVER, body
    from whole_server import WholeServer

    with torch.no_grad():
        server = WholeServer(model(), list(SERVER))
        server.chat(body(0))
    facts["modules"] = loaded()
    print(json.dumps(facts))
    sys.stdout.flush()
    os._exit(0)  # SGLang's threads would keep the process


if __name__ == "__main__":
    main()
