"""Every relative link and anchor in every Markdown page of the repository leads somewhere."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LISTED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.split()
PAGES = sorted(
    path
    for path in LISTED
    if (ROOT / path).is_file() and not re.search(r"^benchmark/.*/page\.md$", path)
)
"""All pages. The templates of benchmark/ have conditions in place of links; what they render is here."""
FENCED = re.compile(r"^```.*?^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
NAMED_IN_CODE = re.compile(r"\bdocs/[\w/-]+\.(?:md|png|svg)\b")


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    text = re.sub(r"`[^`\n]*`", "", FENCED.sub("", path.read_text(encoding="utf-8")))
    for link in LINK.findall(text):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        there = (path.parent / target).resolve() if target else path
        assert there.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in anchors(there), f"{page}: {link}"


def test_pages_of_the_site_link_within_it() -> None:
    """The site has docs/ alone: a page names a file elsewhere by its path, as code."""
    for page in PAGES:
        if page.startswith("docs/"):
            text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
            for link in LINK.findall(text):
                if "://" not in link and not link.startswith("#"):
                    target = (ROOT / page).parent.joinpath(link.partition("#")[0]).resolve()
                    assert target.is_relative_to(ROOT / "docs"), f"{page}: {link}"


def test_pages_that_the_code_names_exist() -> None:
    files = subprocess.run(
        ["git", "ls-files", "*.py", "*.toml", "*.txt", "*.sh", "*.md", "*.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    made = {"docs/figures/chunk_load.png"}  # written by the command that names it
    for name in files:
        if (path := ROOT / name).is_file():
            for page in set(NAMED_IN_CODE.findall(path.read_text(encoding="utf-8"))) - made:
                outside = f"/{page}" in path.read_text(encoding="utf-8")
                assert outside or (ROOT / page).exists(), f"{name}: {page}"


def test_source_files_that_pages_name_exist() -> None:
    """A page may name a file by the end of its path, such as `policy/base.py`."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.sh", "*.txt"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    files = {f"/{path}" for path in listed if (ROOT / path).is_file()}
    to_be_written = {"/python/sglang_canopy/policy/mru.py", "/test/policy/test_mru.py"}
    for page in PAGES:
        text = FENCED.sub("", (ROOT / page).read_text(encoding="utf-8"))
        for name in re.findall(r"`(?:\./)?([\w./-]+\.(?:py|sh|txt))`(?! of commit)", text):
            ends = {path for path in files | to_be_written if path.endswith(f"/{name}")}
            assert ends, f"{page}: {name}"
