"""Inputs with their verdicts, and what runs them, for `bad_inputs.py`. Jobs are those of tests (`cli.tiny_job`)."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
