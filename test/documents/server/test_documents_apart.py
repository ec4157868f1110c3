"""Documents are a separate plugin: a server without them has none of its hooks and modules."""

import json
import os
import sys
from pathlib import Path

import pytest

from support import forked

ENTRY_MODULES = ["canopy_documents", "canopy_documents.plugin", "canopy_documents.plugin.entry"]
START_PROGRAM = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import prepare_server_args
from sglang_canopy.server.scheduler import arrivals
from sglang_canopy.wire import messages, status_file

class Scheduler:
    pass

if sys.argv[1:]:
    prepare_server_args(["--model-path", sys.argv[1], "--radix-eviction", "wa", *sys.argv[2:]])
from prometheus_client import REGISTRY
from canopy_documents.plugin import entry as plugin
from canopy_lab.live.replay import server_plugin
hooks = sys.modules.get("canopy_documents.plugin.hooks")
names = [name for name in sys.modules if name.startswith("canopy_documents")]
series = "canopy_documents.plugin.series" in sys.modules
callbacks = len(arrivals._created_callbacks) + len(arrivals._queued_callbacks)
print(json.dumps({
    "modules": sorted(names),
    "in_place": hooks and all(hook.is_in_place() for hook in hooks.HOOKS),
    "handled": messages.handle_messages(Scheduler(), [messages.DOCUMENTS.key("a")]) if hooks else None,
    "callbacks": callbacks,
    "forced": [hook.is_in_place() for hook in server_plugin.HOOKS],
    "flag": all(hook.is_in_place() for hook in plugin.ADDON.flag_hooks),
    "child": os.environ.get(plugin.ADDON.variable),
}))
"""


def start_facts(*arguments: str, **environment: str) -> dict:
    command = [sys.executable, "-c", START_PROGRAM, *arguments]
    process = forked.run(command, env={**os.environ, **environment})
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments", [(), pytest.param(("--canopy-documents", "off"), marks=pytest.mark.long)]
)
def test_a_server_without_documents_has_only_their_flag(tiny_model: Path, arguments) -> None:
    facts = start_facts(str(tiny_model), *arguments)
    assert facts["modules"] == ENTRY_MODULES
    assert (facts["in_place"], facts["callbacks"], facts["child"]) == (None, 0, None)
    assert facts["flag"]
    assert not any(facts["forced"])


def test_the_launching_process_and_its_children_have_every_hook(tiny_model: Path) -> None:
    flags = ("--canopy-documents", "on", "--canopy-enable-forced-output")
    facts = start_facts(str(tiny_model), *flags)
    assert (facts["in_place"], facts["callbacks"], facts["child"]) == (True, 2, "1")
    assert all(facts["forced"])
    child = start_facts(CANOPY_INSTALL_DOCUMENTS="1")
    assert (child["in_place"], child["callbacks"]) == (True, 2)
    assert not any(child["forced"])
