"""The Plans of `make demo-plans`: of the demonstration's model, executable, and of several kinds."""

import importlib.util
from pathlib import Path

import pytest

from motet.demo.tokenizer import write_tokenizer
from motet.schedule import check_fit, program_of, validate

ROOT = Path(__file__).parents[2]


@pytest.fixture
def demo_plans(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("demo_plans", ROOT / "scripts" / "demo_plans.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(__import__("sys").modules, "demo_plans", module)
    spec.loader.exec_module(module)
    data = tmp_path / "data"
    data.mkdir()
    write_tokenizer(data / "tokenizer", ["what is written here ?"])
    sets = [one.replace(str(module.DATA), str(data)) for one in module.SET]
    for name, value in {"DEMO": ROOT / "recipes/demo.toml", "RECIPE": tmp_path / "recipe.toml", "DATA": data}.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "SET", sets)
    module.write_inputs()
    return module


def test_its_plans_are_of_the_model_and_can_be_executed(demo_plans):
    plans = dict(demo_plans.trainable_plans())
    assert {"data parallel", "modality parallel", "disaggregated", "chain, GPipe", "chain, 1F1B"} <= plans.keys()
    for plan in plans.values():
        check_fit(plan)
        validate(program_of(plan))
        assert {rank for unit in plan.units for rank in unit.ranks} == set(range(demo_plans.NUM_RANKS))
