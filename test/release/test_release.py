"""Parts of a release: one version, a changelog in its format, a workflow of existing commands."""

import re
from pathlib import Path

import yaml

from sglang_canopy import SGLANG_VERSION, __version__, releases

ROOT = Path(__file__).resolve().parents[2]
GITHUB = ROOT / ".github"


def test_one_version_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_cuda_extra_begins_at_the_oldest_tested_sglang() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert f'cuda = ["sglang>={releases.TESTED_RELEASES[0]},<0.6"]' in text
    assert releases.TESTED_RELEASES[-1] == SGLANG_VERSION


def test_the_changelog_has_the_form_of_keep_a_changelog() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text().splitlines()
    versions = [line for line in lines if line.startswith("## ")]
    assert versions[0] == "## [Unreleased]"
    heading = re.compile(r"## \[\d+\.\d+\.\d+\] - (\d{4}-\d\d-\d\d|not tagged yet)")
    assert all(heading.fullmatch(line) for line in versions[1:])
    sections = [line for line in lines if line.startswith("### ")]
    allowed = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert {section.removeprefix("### ") for section in sections} <= allowed
    items = [line for line in lines if line.startswith("- ")]
    assert len(items) == len(set(items)) > 20


def test_the_workflow_runs_the_same_checks_and_attaches_its_build() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    commands = {
        name: "\n".join(step.get("run", "") for step in job["steps"]) for name, job in jobs.items()
    }
    assert ".ci/run" in commands["test"]
    assert "python -m build --outdir dist" in commands["build"]
    assert "__version__" in commands["build"]
    assert "mkdocs build --strict" in commands["docs"]
    assert "test/release/test_wheel.py" in commands["laboratory"]
    assert len(jobs["laboratory"]["strategy"]["matrix"]["python"]) >= 2  # as in test_wheel
    assert jobs["release"]["needs"] == ["test", "build", "laboratory", "docs"]
    assert "dist/*" in commands["release"]
    # Only the job that attaches may write.
    writers = [name for name, job in jobs.items() if "write" in str(job.get("permissions", ""))]
    assert writers == ["release"]
