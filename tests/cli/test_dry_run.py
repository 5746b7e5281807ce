"""`motet train --dry-run`: memory by rank before anything is built, and a refusal of what cannot fit."""

import re

import pytest

from motet.cli import main

RECIPE = """
[run]
batch_size = 8

[cluster]
device = "h100"
ranks_per_node = 4
{memory}

[model.backbone]
num_layers = 2
hidden = 64
mlp = 256
num_heads = 4
vocab_size = 128

[[workload.task]]
name = "chat"
text = {{ value = 40 }}
"""


@pytest.fixture
def motet(tmp_path, monkeypatch, capsys):
    """Runs the command on a recipe: (exit code, stdout in one line, stderr)."""

    def run(memory: str, *options: str) -> tuple[int, str, str]:
        file = tmp_path / "recipe.toml"
        file.write_text(RECIPE.format(memory=memory))
        monkeypatch.setattr("sys.argv", ["motet", "train", str(file), *options])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code or 0
        said = capsys.readouterr()
        return code, " ".join(said.out.split()), said.err

    return run


def test_memory_of_every_rank_is_printed(motet):
    code, out, err = motet("", "--dry-run")
    assert (code, err) == (0, "")
    assert "shared by 4 ranks" in out and "2 examples" in out
    assert [int(rank) for rank in re.findall(r"│ (\d) │", out)] == [0, 1, 2, 3]


def test_what_does_not_fit_is_refused_with_its_rank(motet):
    code, out, err = motet("memory_gbytes = 0.001", "--dry-run")
    assert code == 2 and "Memory by rank" in out
    assert re.search(r"recipe.toml does not fit: Out of memory on 4 of 4 ranks: rank \d", err)


def test_options_that_would_do_nothing_are_refused(motet):
    code, _, err = motet("", "--dry-run", "--trace")
    assert code == 2 and "--dry-run trains nothing" in err
