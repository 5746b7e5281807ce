"""`make demo-generate` itself, on few examples and steps, so that what it makes cannot be read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ttspico")

from PIL import Image

ROOT = Path(__file__).parents[2]
FEW = ("run.steps=2", "run.batch_size=8", "model.generators.draw.sampling.steps=2", "run.report_to=[]")


def test_it_judges_what_it_has_learned_and_says_what_is_missed(tmp_path):
    folders = ["--data", str(tmp_path / "data"), "--run-dir", str(tmp_path / "run")]
    sizes = ["--num-train", "40", "--num-heldout", "20"]
    command = [sys.executable, str(ROOT / "scripts" / "demo_generate.py"), *folders, *sizes]
    ran = subprocess.run(
        [*command, *(option for each in FEW for option in ("--set", each))], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1, ran.stderr
    assert "Missed: fewer than 80% are read as asked" in ran.stderr
    assert "of 20 held-out prompts (speech " in ran.stdout
    assert "chance 10%" in ran.stdout
    made = json.loads((tmp_path / "run" / "made.json").read_text())
    assert [item["place"] for item in made] == list(range(20))
    with Image.open(tmp_path / "run" / "made.png") as page:
        assert page.height > 10 * 8
    assert "What was made of held-out prompts after step 2" in (tmp_path / "run" / "report.html").read_text()
