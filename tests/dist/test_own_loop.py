"""The example of a training loop of one's own, as a user starts it; tests/parity/test_loops.py holds its numbers."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_loop.py"


@pytest.mark.torchrun
def test_own_loop_trains_an_epoch():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE)]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^loss \d\.\d{4}$", done.stdout, re.MULTILINE)) == 8
