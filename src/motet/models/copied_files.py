"""Which files of a model's directory go along with other weights: those that transformers reads beside weights."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken")
_FOLDERS = ("additional_chat_templates",)


def copy_beside_weights(source: Path, target: Path, also: Collection[str] = ()) -> None:
    """Copy config, processor, tokenizer, templates and licences of a directory to `target`, which may exist.

    Files of weights are left out, whatever their format, as they would be those from before; so are their indexes.
    also: names of files to copy as well.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_dir() and path.name in _FOLDERS:
            shutil.copytree(path, target / path.name)
        elif path.is_file() and (path.name in also or _is_copied(path.name)):
            shutil.copyfile(path, target / path.name)


def _is_copied(name: str) -> bool:
    is_known = name.endswith(_COPIED) and not name.endswith(".index.json")
    return is_known or name.upper().startswith(("LICENSE", "NOTICE"))
