"""Every relative link and anchor in every Markdown page of the repository has a target."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def git_files(*patterns: str) -> list[str]:
    """Return the files of these kinds that git has, or will have."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return sorted(path for path in process.stdout.split() if (ROOT / path).is_file())


PAGES = git_files("*.md")
CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PAGE_NAME = re.compile(r"\bdocs/[\w/-]+\.(?:md|png|svg)\b")


def anchors_of(page: Path) -> set[str]:
    """Return the ids of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES)
def test_the_target_of_every_link_exists(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"`[^`\n]*`", "", CODE_BLOCK.sub("", path.read_text(encoding="utf-8")))
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        linked_path = (path.parent / target).resolve() if target else path
        assert linked_path.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors_of(linked_path), f"{page}: {link}"


def test_pages_of_the_site_link_within_it() -> None:
    """The site has docs/ alone: a page names a file elsewhere by its path, as code."""
    for page in PAGES:
        if page.startswith("docs/"):
            text = CODE_BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
            for link in LINK.findall(text):
                if "://" not in link and not link.startswith("#"):
                    target = (ROOT / page).parent.joinpath(link.partition("#")[0]).resolve()
                    assert target.is_relative_to(ROOT / "docs"), f"{page}: {link}"


def test_pages_that_the_code_names_exist() -> None:
    written_by_command = {"docs/figures/chunk_load.png"}  # written by the command that names it
    for file in git_files("*.py", "*.toml", "*.txt", "*.sh", "*.md", "*.json"):
        text = (ROOT / file).read_text(encoding="utf-8")
        for page in set(PAGE_NAME.findall(text)) - written_by_command:
            assert f"/{page}" in text or (ROOT / page).exists(), f"{file}: {page}"


def test_source_files_that_pages_name_exist() -> None:
    """A page may name a file by the end of its path, such as `policy/base.py`."""
    files = {f"/{path}" for path in git_files("*.py", "*.sh", "*.txt")}
    to_be_written = {"/python/sglang_canopy/policy/mru.py", "/test/policy/test_mru.py"}
    for page in PAGES:
        text = CODE_BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for file_name in re.findall(r"`(?:\./)?([\w./-]+\.(?:py|sh|txt))`(?! of commit)", text):
            matches = {path for path in files | to_be_written if path.endswith(f"/{file_name}")}
            assert matches, f"{page}: {file_name}"
