"""Ways in which a checkpoint is not as it was written, each by what it is called; and a manifest that hides them."""

import hashlib
import json
import os
import pickle
import shutil


def flip(path, place):
    """Change one bit of a file, `place` of the way into it."""
    content = bytearray(path.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def _link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def _folder(path):
    path.unlink()
    path.mkdir()


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


OF_A_FILE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut by a byte": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut in half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first bit": lambda path: flip(path, 0),
    "a bit in the middle": lambda path: flip(path, 0.5),
    "last bit": lambda path: flip(path, 1),
    "link to itself": _link_to_itself,
    "dangling link": lambda path: (path.unlink(), path.symlink_to("absent")),
    "folder": _folder,
    "pipe": _pipe,
    "pickle": lambda path: path.write_bytes(pickle.dumps({"step": 8})),
}
FILES = ("rank-00000.safetensors", "tensors.json", "state.json", "manifest.json")

OF_JSON = {
    "null": "null",
    "list": "[]",
    "number": "3",
    "object": "{}",
    "text": '"step"',
    "not a number": '{"format": NaN, "step": NaN}',
    "half an object": '{"step": 8,',
    "deep": "[" * 100_000,
    "endless number": '{"step": ' + "9" * 10_000 + "}",
    "no unicode": '{"step": "\udcff"}',
}

OF_THE_FOLDER = {
    "empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "file": lambda folder: (shutil.rmtree(folder), folder.write_text("")),
    "of another step": lambda folder: (
        shutil.rmtree(folder),
        shutil.copytree(folder.with_name("step-00000004"), folder),
    ),
}

OF_THE_STATE = {
    "step -5": {"step": -5},
    "step 10**9": {"step": 10**9},
    "step 10**30": {"step": 10**30},
    "step 8.0": {"step": 8.0},
    "step '8'": {"step": "8"},
    "step true": {"step": True},
    "no step": {"step": None},
    "position -1": {"position": -1},
    "ranks 0": {"num_ranks": 0},
    "more skipped than done": {"num_skipped": 10**9},
    "more dropped than met": {"num_bad": 10**9},
    "unknown key": {"temperature": 1},
    "no time": {"written": "yesterday"},
}
"""Hidden from the checksums."""


def write_json(path, text):
    path.write_text(text, errors="surrogateescape")


def change_state(checkpoint, changes):
    """Change `state.json`, and the manifest so that its checksums are right."""
    state = json.loads((checkpoint / "state.json").read_text()) | changes
    (checkpoint / "state.json").write_text(
        json.dumps({key: value for key, value in state.items() if value is not None})
    )
    forge(checkpoint)


def forge(checkpoint, **changes):
    """Make the manifest say of each file what it now is, and whatever else is given."""
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | changes
    manifest.pop("sha256", None)
    for name, file in manifest["files"].items():
        content = (checkpoint / name).read_bytes()
        file |= {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    body = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    manifest["sha256"] = hashlib.sha256(body.encode()).hexdigest()
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
