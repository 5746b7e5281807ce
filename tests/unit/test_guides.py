"""The examples of the guides run, and what they assert holds."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("guide", "num_blocks"), [("balancing", 7), ("simulating", 2)])
def test_the_examples_of_a_guide_run(guide, num_blocks):
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{guide}.md").read_text(), re.S)
    assert len(blocks) == num_blocks
    exec("\n".join(blocks), {})


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), DOCS.parent / "README.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in headings(target), link
