"""What tests of every layer may ask for."""

import os
import pickle

import pytest


class _Pickled:
    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


class Bomb:
    """A pickle that leaves a folder behind when it is opened."""

    def __init__(self, trace):
        self.trace, self.pickle = trace, pickle.dumps(_Pickled(trace), protocol=2)

    def has_gone_off(self):
        return self.trace.exists()


@pytest.fixture
def bomb(tmp_path):
    return Bomb(tmp_path / "gone-off")
