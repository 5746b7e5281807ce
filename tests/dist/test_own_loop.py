"""The example of a training loop of one's own, as a user starts it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.mark.torchrun
def test_own_loop_gives_the_same_losses_with_balancing():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"loss (\S+) without, (\S+) with balancing", done.stdout)
    assert len(losses) == 4
    assert all(abs(float(a) - float(b)) < 1e-5 for a, b in losses)
    before, after = map(float, re.search(r"max/bound load (\S+) without, (\S+) with", done.stdout).groups())
    assert after < before and after < 1.05


def test_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 80
