"""What a run reports to beside metrics.jsonl: TensorBoard, and services that are packages of their own."""

import json
import sys

import pytest

from motet.core.errors import UserError
from motet.train.recipe.run_config import RunConfig
from motet.train.report.metrics_log import MetricsLog
from motet.train.report.trackers import ServiceRun, open_trackers

SERVICE = """
import json, os
class Run:
    def log(self, scalars):
        if scalars.get("loss") == 13:
            raise ConnectionError("the service has gone")
        with open(os.environ["LOGGED"], "a") as file:
            file.write(json.dumps(scalars) + chr(10))
    def define_metric(self, names, step_metric): pass
    def finish(self): self.log({"finished": 1})
def init(**options):
    if options["config"] == {"refuse": True}:
        raise RuntimeError("no such account\\nmore")
    run = Run()
    run.log(options)
    return run
"""


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A package with the interface that `ServiceRun` uses; returns what is logged."""
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "trackio.py").write_text(SERVICE, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setenv("LOGGED", str(tmp_path / "logged"))
    monkeypatch.delenv("TRACKIO_PROJECT", raising=False)
    sys.modules.pop("trackio", None)
    yield lambda: [json.loads(line) for line in (tmp_path / "logged").read_text(encoding="utf-8").splitlines()]
    sys.modules.pop("trackio", None)


def test_a_service_gets_the_recipe_and_each_step_on_an_axis_of_its_own(service, tmp_path):
    run = ServiceRun("trackio", tmp_path / "mine", {"run": {"steps": 2}})
    run.add({"train/loss": 1.5}, 7)
    run.close()
    assert service() == [
        {"project": "motet", "name": "mine", "config": {"run": {"steps": 2}}},
        {"train/step": 7, "train/loss": 1.5},
        {"finished": 1},
    ]


def test_a_service_that_fails_is_told_of_once_and_the_run_goes_on(service, tmp_path, capsys):
    with MetricsLog(tmp_path, 0, 2, ("trackio", "tensorboard"), {}) as log:
        log._to_trackers(lambda tracker: tracker.add({"loss": 13}, 1))
        log._to_trackers(lambda tracker: tracker.add({"loss": 12}, 2))
        log.check()
    said = capsys.readouterr().out
    assert said == "trackio is not reported to any more (the service has gone); metrics.jsonl has every step.\n"
    assert len(service()) == 1
    assert list((tmp_path / "tensorboard").iterdir())


def test_what_cannot_begin_is_refused_in_one_sentence(service, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r'^run.report_to has "trackio", which cannot begin: no such account\.$'):
        open_trackers(("trackio",), tmp_path, 0, {"refuse": True})
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r'^run.report_to has "wandb", which is not installed .*; run pip install wandb'
    ):
        open_trackers(("wandb",), tmp_path, 0, {})


def test_one_name_or_several(tmp_path):
    def of(report_to):
        return RunConfig(dir=tmp_path, steps=1, batch_size=1, report_to=report_to).report_to

    assert of("wandb") == ("wandb",)
    assert of(["trackio", "wandb"]) == ("trackio", "wandb")
    assert of([]) == ()
    with pytest.raises(ValueError, match="'tensorboard', 'wandb' or 'trackio'"):
        of("mlflow")


def test_weights_and_biases_itself_writes_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = ServiceRun("wandb", tmp_path, {"run": {"steps": 2}})
    run.add({"train/loss": 1.5}, 1)
    run.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_trackio_itself_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # Read when the package is imported.
    pytest.importorskip("trackio")
    run = ServiceRun("trackio", tmp_path, {"run": {"steps": 2}})
    run.add({"train/loss": 1.5}, 1)
    run.close()
    assert list((tmp_path / "trackio").glob("motet*"))
