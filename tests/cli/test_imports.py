"""What a command imports before it does anything: time that everybody waits for, who plans or only asks for help."""

import subprocess
import sys

import pytest

SCRIPT = """
import sys
from motet.cli import main
sys.argv = ["motet", *sys.argv[1:]]
try:
    main()
except SystemExit:
    pass
print("modules:", *sys.modules)
"""

READERS = {"motet.train.checkpoint.contents", "motet.data.order", "motet.data.index", "pyarrow"}
MODELS = {"torch", "transformers", "motet.models", "motet.runtime"}
PAGES = {"plotly", "scipy", "motet.simulate.show.page", "motet.planner.explain"}


def imported(*arguments):
    """The modules that a command has imported at its end."""
    ran = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    return set(ran.stdout.splitlines()[-1].split()[1:])


def test_help_needs_neither_arrays_nor_validation():
    modules = imported("--help")
    assert not modules & {"numpy", "pydantic", "PIL", *MODELS}
    assert sum(name.startswith("motet") for name in modules) <= 9


@pytest.mark.parametrize(("command", "most"), [("plan recipe.toml", 295), ("simulate plan.json", 250)])
def test_commands_that_decide_import_no_models_and_no_readers_of_data(command, most):
    """The file is not there, so that a command ends when it has imported what it always needs."""
    modules = imported(*command.split())
    assert "motet.simulate.predict.predict" in modules
    assert not modules & (READERS | MODELS | PAGES | {"motet.balance.reference"})
    assert sum(name.startswith("motet") for name in modules) <= most


@pytest.mark.parametrize(
    "command",
    [
        "train no.toml --dry-run",
        "train no.toml --plan no.json",
        "simulate no.toml",
        "analyze no.toml",
        "profile no.toml",
        "plan no.toml --profile no.json",
        "export no --out out",
    ],
)
def test_a_file_that_is_not_there_is_said_before_torch_is_imported(command):
    """Which takes seconds, and more on a file system of many machines."""
    assert not imported(*command.split()) & {"torch", "transformers", "motet.models"}
