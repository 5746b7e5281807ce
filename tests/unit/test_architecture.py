"""What docs/architecture.md and docs/tree.md say of where things are is so."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "motet"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TREE = (ROOT / "docs" / "tree.md").read_text(encoding="utf-8")
MENTIONED = sorted(set(re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", PAGE)))


def listed() -> list[tuple[str, str]]:
    """The paths of the tree and their subjects: a heading a folder, or `src/motet` itself, then a block of lines."""
    found = []
    for part in re.split(r"^## ", TREE, flags=re.MULTILINE)[1:]:
        heading, block = part.split("\n", 1)[0], part.split("```")[1]
        folder = "" if heading == "src/motet" else heading
        found += [
            (folder + path, subject) for path, _, subject in (line.partition(" ") for line in block.split("\n") if line)
        ]
    return found


def test_the_tree_has_every_file_once_and_nothing_else():
    files = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}
    assert sorted(path for path, _ in listed()) == sorted(file for file in files if not file.endswith("__init__.py"))


def test_each_line_of_the_tree_has_a_subject():
    assert [path for path, subject in listed() if not subject.strip()] == []


@pytest.mark.parametrize(("path", "name"), MENTIONED, ids=lambda part: part)
def test_what_the_page_mentions_exists(path, name):
    text = (SOURCE / path).read_text(encoding="utf-8")
    for part in filter(None, name.split(".")):
        assert re.search(rf"^ *(class|def) {part}\b", text, re.MULTILINE), f"{path} does not define {part}"


def test_the_number_of_files_to_the_loss_is_that_of_the_stations():
    walk = PAGE.partition("## One example")[2]
    stations, _, rest = walk.partition(" files to the loss**")
    said = int(stations.rpartition("**")[2])
    assert rest
    assert said == len(set(re.findall(r"`([\w/]+\.py)", stations)))
