"""The guide's examples run, and what they assert holds."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "balancing.md"


def test_the_examples_of_the_guide_run():
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 5
    exec("\n".join(blocks), {})
