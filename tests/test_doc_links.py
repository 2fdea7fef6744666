"""Links between the pages of the documentation lead to pages and headings that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(#[^)\s]*)?\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_has_a_target(page: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(path + anchor)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = {
        (page.parent / path).resolve()
        for page in (ROOT / "docs" / "README.md", ROOT / "docs" / "measurements" / "README.md")
        for path, _ in LINK.findall(page.read_text(encoding="utf-8"))
    }
    pages = {page.resolve() for page in (ROOT / "docs").rglob("*.md") if not page.is_symlink()}
    assert {page for page in pages if page not in index and page.name != "README.md"} == set()
