"""`motet simulate`: what is wrong with a plan is said in one sentence, and ends with exit code 2."""

import json
import sys

import pytest

from motet.cli import main


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (None, "Cannot read the plan {path}: No such file or directory."),
        ({"motet_plan": 1, "units": []}, "{path}: 'model' is missing and has no default."),
        ({"motet_plan": 1, "unit": []}, "{path}: unknown key 'unit'; did you mean 'units'?"),
    ],
)
def test_a_wrong_plan(document, said, tmp_path, capsys, monkeypatch):
    path = tmp_path / "plan.json"
    if document is not None:
        path.write_text(json.dumps(document))
    monkeypatch.setattr(sys, "argv", ["motet", "simulate", str(path)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.strip() == said.format(path=path)
