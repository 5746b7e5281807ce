"""The command line itself: quick to answer, and the same as `python -m motet`."""

import subprocess
import sys

import motet
from ranks import TIMEOUT_S


def motet_command(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_version_and_help_do_not_import_torch():
    said = motet_command("-m", "motet", "--version")
    assert (said.returncode, said.stdout) == (0, f"motet {motet.__version__}\n")
    program = (
        "import sys; sys.argv = ['motet', '--help']\nfrom motet.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    )
    said = motet_command("-c", program + "print('torch' in sys.modules)")
    assert said.stdout.endswith("False\n")
    for command in ("train", "simulate", "analyze", "demo-data"):
        assert command in said.stdout


def test_an_unknown_command_exits_with_2_and_no_traceback():
    said = motet_command("-m", "motet", "trian")
    assert said.returncode == 2
    assert "Traceback" not in said.stderr
