"""`make demo-generate`: how it judges, and the command itself, on so few examples that nothing can be read."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from motet.demo import Judge

ROOT = Path(__file__).parents[2]
FEW = ("run.steps=2", "run.batch_size=8", "model.generators.draw.sampling.steps=2", "run.report_to=[]")


def test_real_digits_are_read_and_drawn_beside_real_ones(capsys):
    spec = importlib.util.spec_from_file_location("demo_generate", ROOT / "scripts" / "demo_generate.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    judge = Judge()
    pixels, digits = (part[:50] for part in judge.real["heldout"])
    verdict, read = judge.verdict(pixels, digits), judge.read(pixels)
    assert (read == digits).mean() > 0.8
    demo.report(verdict, read, digits, ["text", "speech"] * 25)
    said = capsys.readouterr().out
    assert f"asked for: {verdict.read:.0%} of 50 held-out prompts (speech " in said and "chance 10%" in said
    wrong = np.where(np.arange(50) == 0, (digits + 1) % 10, digits)
    pages = [demo.draw(pixels, each, digits, judge.real["heldout"]) for each in (digits, wrong)]
    red = [(np.asarray(page) == (255, 0, 0)).all(axis=-1).any() for page in pages]
    assert red == [False, True] and pages[0].height > 10 * 8


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ttspico") is None, reason="the extra motet[demo] is not installed")
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
