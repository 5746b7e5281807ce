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
