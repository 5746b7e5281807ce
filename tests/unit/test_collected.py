"""`make test` runs every folder of tests: by itself pytest passes over folders of some names, `dist` among them.

And of each file that starts ranks or commands it runs something: not all may be marked slow.
"""

from fnmatch import fnmatch
from pathlib import Path

import pytest

from tiers import COLLECTED

TESTS = Path(__file__).parents[1]


def test_no_folder_is_passed_over(pytestconfig):
    patterns = pytestconfig.getini("norecursedirs")
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert Path("dist") in folders
    passed_over = {part for folder in folders for part in folder.parts if any(fnmatch(part, each) for each in patterns)}
    assert not passed_over


@pytest.mark.parametrize("folder", ["dist", "parity", "cli"])
def test_of_every_file_something_is_not_slow(pytestconfig, folder):
    collected, files = pytestconfig.stash[COLLECTED], set((TESTS / folder).glob("test_*.py"))
    assert files
    if not files <= collected.keys():
        pytest.skip(f"tests/{folder} is not collected with it as a whole")
    assert sorted(file.name for file in files if not collected[file]) == []
