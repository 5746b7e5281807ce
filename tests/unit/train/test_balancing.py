from types import SimpleNamespace

import pytest

from motet.core.errors import UserError
from motet.dispatch import Decision
from motet.train.balancing import check_same_backend
from motet.train.metrics import balance_metrics
from motet.train.summary import methods_line


def test_ranks_with_different_cores_are_refused():
    check_same_backend(SimpleNamespace(gather=lambda own: [own, own, own]))
    with pytest.raises(UserError, match="Rank 2 balances without the native core and rank 0 with it"):
        check_same_backend(SimpleNamespace(gather=lambda own: ["native", "native", "fallback"]))


def test_metrics_count_methods_and_add_up_seconds_over_microbatches():
    decisions = [
        Decision({}, {}, {}, 0.0, "joint", "joint: first", {"joint": 0.25, "per_phase": 0.5}),
        Decision({}, {}, {}, 0.0, "mixed", "mixed: it", {"joint": 0.5, "mixed": 0.25, "per_phase": 0.5}),
        Decision({}, {}, {}, 0.0, "joint", "joint: second", {"joint": 0.25, "per_phase": 0.5}),
    ]
    assert balance_metrics([SimpleNamespace(decision=decision) for decision in decisions]) == {
        "methods": {"joint": 2, "mixed": 1},
        "predicted_s": {"joint": 1.0, "mixed": 0.25, "per_phase": 1.5},
        "why": {"joint": "joint: second", "mixed": "mixed: it"},
    }
    assert methods_line({"mixed": 1, "joint": 1200}) == "joint 1,200, mixed 1 of 1,201 microbatches"
