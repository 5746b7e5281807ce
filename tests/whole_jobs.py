"""Jobs of tiny whole models (`benchmarks/whole_models.py`), written once for all tests of a file."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark import benchmark
from motet.core.errors import UserError
from motet.train.recipe.recipe_file import load_recipe

with benchmark("whole_models") as whole_models:
    pass


def whole_job(family: str, num_examples: int = 8) -> Any:
    """A fixture of a file: the folder of a job, with `recipe.toml`, `model/` and examples. Who changes it copies it."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        recipe: Path = whole_models.write_job(tmp_path_factory.mktemp(family), family, num_examples)
        return recipe.parent

    return folder


def changed(file, **changes):
    """A JSON file with other values; a dict changes the table of its name."""
    stored = json.loads(file.read_text())
    for key, value in changes.items():
        if isinstance(value, dict):
            stored[key] |= value
        else:
            stored[key] = value
    file.write_text(json.dumps(stored))


def complaint(job, *overrides) -> str:
    """What is said of a job that is refused, with paths that begin at its folder."""
    with pytest.raises(UserError) as caught:
        load_recipe(job / "recipe.toml", overrides).transform("image")
    return str(caught.value).replace(f"{job}/", "")
