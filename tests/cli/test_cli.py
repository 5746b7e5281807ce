"""The command line itself: quick to answer, and the same as `python -m motet`."""

import re
import subprocess
import sys

import pytest
import typer

import motet
from motet.cli import app, main
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian"], "motet: no such command 'trian'; did you mean 'train'?"),
        (["zebra"], "motet: no such command 'zebra'; see `motet --help`."),
        (["train"], "motet train: missing argument 'RECIPE.toml'; see `motet train --help`."),
        (
            ["recipe-schema", "x"],
            "motet recipe-schema: got unexpected extra argument(s) (x); see `motet recipe-schema --help`.",
        ),
        (["train", "--bogus"], "motet train: no such option: --bogus; see `motet train --help`."),
        (["train", "a", "b"], "motet train: got unexpected extra argument(s) (b); see `motet train --help`."),
        (["plan", "a.toml", "--nodes"], "'--nodes' requires an argument"),
        (["plan", "a.toml", "--nodes", "1000000000"], "'--nodes': must be less than or equal to 100000"),
        (["analyze", "a.csv", "--ranks", "1000000000"], "'--ranks': must be less than or equal to 1048576"),
        (
            ["analyze", "a.csv", "--batch-size", "1000000000000"],
            "'--batch-size': must be less than or equal to 1000000",
        ),
        (["analyze", "a.csv", "--batch-size", "1000000"], "50 batches of 1,000,000 examples on 8 ranks are too many"),
        (["simulate", "a.json", "--batches", "1000000000"], "'--batches': must be less than or equal to 10000"),
        (["simulate", "a.json", "--seed", str(10**30)], "'--seed': must be less than or equal to 9223372036854775807"),
        (["simulate", "a.json", "--cluster", ""], "the argument after '--cluster' is empty; give it a value"),
        (
            ["simulate", "a.json", "--html", "absent/a.html"],
            "absent/a.html cannot be written: there is no folder absent",
        ),
        (["profile", "a.toml", "--seconds", "nan"], "'--seconds': must be "),
        (["demo-data", "out", "--num-train", "1000000000"], "'--num-train': must be less than or equal to 1000000"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(words, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["motet", *words])
    with pytest.raises(SystemExit, match="2"):
        main()
    told = capsys.readouterr().err.strip()
    assert said in told
    assert "\n" not in told and told[-1] in ".?"


def test_no_help_has_what_rich_would_take_for_its_markup_and_leave_out():
    commands = typer.main.get_command(app).commands.values()
    texts = [text for one in commands for text in (one.help, *(getattr(each, "help", "") for each in one.params))]
    assert any("this machine" in text for text in filter(None, texts))
    assert not [text for text in filter(None, texts) if re.search(r"\[[a-z/@#]", text)]
