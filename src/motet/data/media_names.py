"""What a record may name an item by: a path, a URL, a data URL, or a table of bytes and path as HF datasets have it."""

from __future__ import annotations

from motet.core.errors import UserError
from motet.data.record_fields import kind_of
from motet.data.remote import LOCAL_URL, check_protocol, is_url

DATA_URL = "data:"
"""How bytes begin that a record holds."""
DATA_URL_HEAD = f"{DATA_URL};base64,"
"""How bytes begin that are written in base64, of no stated type."""

_TABLE = {"bytes", "path"}


def media_name(value: object, where: str) -> str:
    """A path, or a URL that Motet reads. where: the record and its field. Raises UserError for anything else."""
    if isinstance(value, dict) and value.keys() <= _TABLE and value:
        # What a column of images or audio of HF datasets holds; the path is the name that the bytes once had.
        value = value.get("bytes") or value.get("path")
        if not value:
            raise UserError(f"{where} has neither bytes nor a path")
    if not isinstance(value, str) or not value:
        raise UserError(f"{where} is {kind_of(value)}, but must be a file name, or a data URL with its bytes")
    if is_url(value):
        check_protocol(value, f"{where} is the URL '{value[:60]}'")
    return value.removeprefix(LOCAL_URL)
