from types import SimpleNamespace

import pytest

from motet.core.errors import UserError
from motet.train.balancing import check_same_backend


def test_ranks_with_different_cores_are_refused():
    check_same_backend(SimpleNamespace(gather=lambda own: [own, own, own]))
    with pytest.raises(UserError, match="Rank 2 balances without the native core and rank 0 with it"):
        check_same_backend(SimpleNamespace(gather=lambda own: ["native", "native", "fallback"]))
