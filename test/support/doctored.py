"""Reports of ``canopy doctor``, made in a process of its own: SGLang is hooked there."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from support import forked

LABEL = "ANSWER"
"""Stands before the answer, since imports may print too."""
_DOCTOR = """
import contextlib, io, json, sys
from canopy_lab.cli.main import main
found = {}
for name, words in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["doctor", "--json", *words])
    found[name] = {"code": status, "said": err.getvalue(), **json.loads(out.getvalue() or "{}")}
print("ANSWER" + json.dumps(found))
"""


def reports_on(words: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the doctor's report on each command line, with its exit status and error output."""
    done = forked.run([sys.executable, "-c", _DOCTOR, json.dumps(words)], timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.rpartition(LABEL)[2])
    return found
