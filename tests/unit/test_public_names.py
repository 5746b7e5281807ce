"""Public names of src: each stands for one thing, and src uses it.

A name that only benchmarks and tests use belongs to them. The library's own interface is the exception: what a package
lists in `__all__` and a page of docs/ tells of.
"""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src" / "motet").rglob("*.py"))
CALLED_BY_OTHERS = {
    "serve": "run as a module by data/worker_process.py",
    "serve_ray": "run as a program by data/ray_server.py",
    "Encoder": "a protocol, which users' modules fulfil",
}


def is_command(node):
    """typer calls it."""
    return any(ast.unparse(decorator).startswith("app.command(") for decorator in node.decorator_list)


def defined(tree):
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            if not is_command(node):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def used(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def listed(tree):
    """Names in `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__all__" for target in node.targets):
            yield from ast.literal_eval(node.value)


def test_every_public_name_is_used_in_src_or_documented():
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES]
    names = {name for tree in trees for name in defined(tree) if not name.startswith("_")}
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (*ROOT.glob("docs/*.md"), ROOT / "README.md"))
    documented = set(re.findall(r"\w+", pages))
    interface = {name for tree in trees for name in listed(tree)} & documented
    left = names - {name for tree in trees for name in used(tree)} - interface
    assert left == CALLED_BY_OTHERS.keys(), "used by benchmarks and tests alone: move it there, or document it"


def test_no_public_name_stands_for_two_things():
    """The readable reference has the names of what it is the reference of: that is its purpose."""
    paths = [path for path in SOURCES if path.parent.name != "reference"]
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    names = Counter(name for tree in trees for name in set(defined(tree)) if not name.startswith("_"))
    assert [name for name, count in names.items() if count > 1] == []
