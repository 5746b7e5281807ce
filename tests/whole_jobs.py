"""Jobs of tiny whole models (`benchmarks/whole_models.py`), written once for all tests of a file."""

from pathlib import Path
from typing import Any

import pytest

from benchmark import benchmark

with benchmark("whole_models") as whole_models:
    pass


def whole_job(family: str, num_examples: int = 8) -> Any:
    """A fixture of a file: the folder of a job, with `recipe.toml`, `model/` and examples. Who changes it copies it."""

    @pytest.fixture(scope="module")
    def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
        recipe: Path = whole_models.write_job(tmp_path_factory.mktemp(family), family, num_examples)
        return recipe.parent

    return folder
