"""What docs/glossary.md says of where words are defined is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "motet"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    if re.match(r"\| (?!word)\w", line)
]


def test_a_word_has_one_row():
    words = [word for row in ROWS for word in row[0].split(", ")]
    assert len(words) == len(set(words)) > 40
    assert {len(row) for row in ROWS} == {4}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_word_is_where_its_row_says(row):
    path, _, name = row[2].strip("`").partition(": ")
    assert (SOURCE / path).exists()
    if name:
        text = (SOURCE / path).read_text(encoding="utf-8")
        assert re.search(rf"^(class|def) {name}\b", text, re.MULTILINE), f"{path} does not define {name}"


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in SOURCE.glob("*/__init__.py")))
def test_every_folder_names_the_glossary(folder):
    assert "docs/glossary.md" in (SOURCE / folder / "__init__.py").read_text(encoding="utf-8")
