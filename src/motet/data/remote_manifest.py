"""The files that the URL of a manifest names: one file, a pattern, or a folder of tar shards."""

from __future__ import annotations

import glob
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import IO

from motet.core.errors import UserError
from motet.data.copies import Copies
from motet.data.remote import Found, check_protocol, find_all, is_web, matches, names_in, path_of
from motet.data.shard_names import TAR_ENDINGS, expand_braces

_SAVED = ("state.json", "dataset_dict.json")


@dataclass(frozen=True)
class RemoteFile:
    """A remote file of a manifest, with what readers of manifests ask of a Path. It is read as a local copy."""

    found: Found
    copies: Copies

    def __str__(self) -> str:
        return self.found.url

    @property
    def name(self) -> str:
        """The file's name, with its ending."""
        return path_of(self.found.url).name

    @property
    def suffix(self) -> str:
        """The ending of its name, as `Path.suffix`."""
        return path_of(self.found.url).suffix

    def with_suffix(self, suffix: str) -> PurePosixPath:
        """Its path with another ending."""
        return path_of(self.found.url).with_suffix(suffix)

    def open_copy(self) -> IO[bytes]:
        """Its bytes. Raises as `Copies.open`."""
        return self.copies.open_whole(self.found)

    def of_version(self, version: str) -> RemoteFile:
        """The same file, with copies of their own."""
        return replace(self, copies=self.copies.of_version(version))


def remote_files(spec: str, copies: Copies | None) -> tuple[RemoteFile, ...]:
    """The files of a manifest by its URL, in order. Raises UserError for one that is not there, or cannot be reached.

    copies: where they are copied to; None: nobody has said.
    """
    where = f"manifest {spec}"
    if copies is None:
        raise UserError(
            f"{where}: is a URL, and nothing is downloaded without a folder for local copies; set data.cache_folder"
        )
    check_protocol(spec, where)
    names = [name for pattern in expand_braces(spec) for name in _matching(pattern)]
    found = find_all(names)
    if len(names) == 1 and found[0] is None:
        names = _shards_in(spec)
        found = find_all(names)
    if missing := [name for name, each in zip(names, found) if each is None]:
        raise UserError(f"{where}: shard {missing[0]} is missing ({len(missing)} of {len(names)} are)")
    files = [RemoteFile(each, copies) for each in found if each is not None]
    if not files:
        raise UserError(f"{where}: there is no such file; it must be a .json, .jsonl, .parquet or .tar file, or shards")
    if unknown := next((file for file in files if not file.found.version), None):
        raise UserError(
            f"{where}: the server of {unknown} says neither ETag nor time of change, so a change could not be seen; "
            "copy the manifest to this machine"
        )
    return tuple(files)


def _matching(pattern: str) -> list[str]:
    # In a web address a question mark begins the query.
    if is_web(pattern) or not glob.has_magic(pattern.partition("://")[2]):
        return [pattern]
    return matches(pattern)


def _shards_in(folder: str) -> list[str]:
    """The shards of a folder, in order of name; [] if it has none, or cannot be listed."""
    try:
        names = names_in(folder)
    except NotImplementedError:
        return []
    if any(path_of(name).name in _SAVED for name in names):
        raise UserError(f"manifest {folder}: is a dataset that save_to_disk wrote, which is read from a disk alone")
    return [name for name in names if name.lower().endswith(TAR_ENDINGS)]
