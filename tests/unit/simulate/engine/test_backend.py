"""Without the native engine: the reference, and one warning."""

import subprocess
import sys

WITHOUT_NATIVE_ENGINE = """
import sys, warnings
sys.modules["motet.simulate._engine"] = None
from motet.schedule import one_f_one_b
from motet.simulate import simulate, stage_times
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert simulate(one_f_one_b(4, 8), stage_times([1] * 4, [2] * 4)).makespan_s == 33.0
assert [str(warning.message)[:38] for warning in caught] == ["The native engine of motet.simulate is"], caught
assert caught[0].filename == "<string>", caught[0].filename
"""


def test_simulates_without_the_native_engine_after_one_warning():
    subprocess.run([sys.executable, "-c", WITHOUT_NATIVE_ENGINE], check=True)


def test_the_native_engine_is_there():
    from motet.simulate import _engine

    assert _engine.__doc__ == "Native engine of motet.simulate."
