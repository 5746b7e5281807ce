"""The torch-free half of the house is importable on a machine, or in a process, that has no torch."""

import pkgutil
import subprocess
import sys

import pytest

import motet

TORCH_FREE = [
    name
    for name in ("core", "cost", "balance", "schedule", "assign", "simulate", "planner", "data", "demo", "analyze")
    if any(module.name == name for module in pkgutil.iter_modules(motet.__path__))
]

IMPORT_ALL = """
import importlib, pkgutil, sys

class Unimportable:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torchvision"):
            raise ModuleNotFoundError(f"{name} was made unimportable")

sys.meta_path.insert(0, Unimportable())
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""


@pytest.mark.parametrize("layer", TORCH_FREE)
def test_layer_imports_without_torch(layer):
    subprocess.run([sys.executable, "-c", IMPORT_ALL, f"motet.{layer}"], check=True)


def test_motet_itself_imports_without_torch():
    subprocess.run([sys.executable, "-c", IMPORT_ALL.split("package =", maxsplit=1)[0] + "import motet"], check=True)
