"""Cases of settings and of command lines for bad_inputs.py, generated from the schemas."""

from __future__ import annotations

from collections.abc import Iterator

from bad_inputs_run import Case


def cases(seed: int) -> Iterator[Case]:
    """All cases, the same for a seed."""
    run = ("train", "{shared}/recipe.toml", "--set", "run.dir={folder}/run", "--set", "run.steps=1")
    yield Case("train/settings/none", run, "accept")
    yield Case("train/settings/optimizer.lr=nan", (*run, "--set", "optimizer.lr=nan"), "refuse", says="optimizer.lr")
