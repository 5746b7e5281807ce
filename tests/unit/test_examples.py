"""Public classes have examples, and the examples in docstrings print what they say."""

import ast
import doctest
import importlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
GLOSSARY = Path(__file__).parents[2] / "docs" / "glossary.md"
WITH_EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>>" in path.read_text(encoding="utf-8"))


def public_classes():
    """Names of classes that a package exports, or that the glossary names."""
    names = set(re.findall(r"`[\w/]+\.py: (\w+)`", GLOSSARY.read_text(encoding="utf-8")))
    for path in SOURCE.rglob("__init__.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                names.update(ast.literal_eval(node.value))
    return names


def test_public_classes_have_examples():
    names = public_classes()
    classes = [
        node
        for path in SOURCE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in names
    ]
    assert len(classes) > 60
    assert [node.name for node in classes if "Example" not in (ast.get_docstring(node) or "")] == []


def module_of(path):
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=module_of)
def test_the_examples_of_a_module_print_what_they_say(path):
    results = doctest.testmod(importlib.import_module(module_of(path)), optionflags=doctest.ELLIPSIS)
    assert results.attempted > 0
    assert results.failed == 0
