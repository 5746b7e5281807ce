"""`make test` runs every folder of tests: by itself pytest passes over folders of some names, `dist` among them."""

from fnmatch import fnmatch
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_folder_is_passed_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert Path("dist") in folders
    passed_over = {part for folder in folders for part in folder.parts if any(fnmatch(part, each) for each in patterns)}
    assert not passed_over
