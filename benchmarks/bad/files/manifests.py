"""Bad manifests, shards and tables of lengths, read by analyze, train, simulate and plan."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from bad.commands import LENGTHS
from bad.files.base import as_lines, record, records, train, whole_job
from bad.files.damage import (
    PLACES,
    Change,
    Damage,
    cut,
    damaged,
    flip,
    nothing_left,
    overwrite,
    placed,
    replace,
    text,
    zeros,
)
from bad.run import Case, Verdict

_DEEP = 100_000
_TABLE = LENGTHS.encode()


def manifest_cases(seed: int) -> Iterator[Case]:
    """Each format of a manifest: its bytes damaged, its records wrong, other things in its place."""
    yield from _json_cases()
    yield from _record_cases()
    yield from _parquet_cases(seed)
    yield from _tar_cases(seed)
    yield from _table_cases()
    for ending in ("jsonl", "json", "parquet", "tar", "csv"):
        for name, place in PLACES.items():
            yield _analyze(f"{ending}/{name}", f"data.{ending}", "refuse", place, rf"data\.{ending}")
    for name, place in PLACES.items():
        yield train(f"manifest/{name}", "refuse", placed("train.jsonl", place), says="train.jsonl")


def _analyze(name: str, file: str, verdict: Verdict, content: bytes | Change, says: str = "", *more: str) -> Case:
    """A file for `motet analyze`, beside the media of the whole job."""

    def prepare(folder: Path) -> None:
        (folder / "media").symlink_to(whole_job() / "media")
        if isinstance(content, bytes):
            (folder / file).write_bytes(content)
        else:
            (folder / file).touch()
            content(folder / file)

    return Case(f"analyze/{name}", ("analyze", "{folder}/" + file, "--ranks", "2", *more), verdict, prepare, says)


def _json_cases() -> Iterator[Case]:
    """Bytes of JSON and JSONL."""
    good = as_lines(records()).encode()
    listed = json.dumps(records(), indent=1).encode()
    refused = {
        "empty": b"",
        "empty lines": b"\n\n\n",
        "zeros": zeros(good),
        "a web page": text(good),
        "cut to a half": cut(0.5)(good),
        "UTF-16": good.decode().encode("utf-16"),
        "a byte that is not UTF-8": good.replace(b"say a", b"say \xff"),
        "a list": listed,
        "100,000 brackets": b"[" * _DEEP + b"]" * _DEEP + b"\n",
        "100,000 objects": b'{"a":' * _DEEP + b"1" + b"}" * _DEEP + b"\n",
        "100,000 brackets that do not close": b"[" * _DEEP,
        "a number of 5,000 digits": good.replace(b'"id": "0"', b'"id": ' + b"9" * 5000),
        "1e999": good.replace(b'"id": "0"', b'"id": 1e999'),
        "NaN": good.replace(b'"id": "0"', b'"id": NaN'),
        "Infinity": good.replace(b'"id": "0"', b'"id": -Infinity'),
        "a key twice": good.replace(b'"id": "0"', b'"id": "0", "id": "1"'),
        "a key twice, inside": good.replace(b'"from": "gpt"', b'"from": "gpt", "from": "human"', 1),
        "a lone surrogate": good.replace(b"say a", b"say \\ud800"),
        "a lone surrogate in a key": good.replace(b'"id"', b'"\\udfff"', 1),
        "two records in a line": good.replace(b"\n", b"", 1),
        "a comment": b"# records\n" + good,
        "a comma behind": good.replace(b"}]}\n", b"}],}\n", 1),
        "quotes of another kind": good.replace(b'"', b"'"),
        "a control character": good.replace(b"say a", b"say \x01"),
        "zeros behind the last record": good + bytes(4096),
    }
    for name, data in refused.items():
        yield _analyze(f"jsonl/{name}", "data.jsonl", "refuse", data, r"data\.jsonl")
    listed_refused = {
        "empty": b"",
        "an empty list": b"[]",
        "an object": b'{"records": []}',
        "lines": good,
        "cut to a half": cut(0.5)(listed),
        "cut by its last bracket": listed.rstrip()[:-1],
        "two lists": listed + listed,
        "UTF-16": listed.decode().encode("utf-16"),
        "100,000 brackets": b"[" * _DEEP + b"]" * _DEEP,
        "a number of 5,000 digits": listed.replace(b'"id": "0"', b'"id": ' + b"9" * 5000),
        "NaN": listed.replace(b'"id": "0"', b'"id": NaN'),
        "null": b"null",
        "a text among records": b'["text", ' + listed.lstrip()[1:],
        "a lone surrogate": listed.replace(b"say a", b"say \\udc80"),
        "a key twice": listed.replace(b'"id": "0"', b'"id": "0", "id": "1"'),
    }
    for name, data in listed_refused.items():
        yield _analyze(f"json/{name}", "data.json", "refuse", data, r"data\.json")
    accepted = {
        "jsonl/a byte order mark": ("data.jsonl", b"\xef\xbb\xbf" + good),
        "jsonl/line ends of Windows": ("data.jsonl", good.replace(b"\n", b"\r\n")),
        "jsonl/empty lines between": ("data.jsonl", good.replace(b"\n", b"\n\n")),
        "jsonl/no end of its last line": ("data.jsonl", good.rstrip()),
        "jsonl/a whole pair of surrogates": ("data.jsonl", good.replace(b"say a", b"say \\ud83d\\ude00")),
        "jsonl/a million characters": ("data.jsonl", good.replace(b"say a", b"say " + b"a" * 10**6)),
        "jsonl/ending in capitals": ("data.JSONL", good),
        "json/a byte order mark": ("data.json", b"\xef\xbb\xbf" + listed),
        "jsonl/99 levels of metadata": ("data.jsonl", good.replace(b'"id": "0"', b'"id": ' + b"[" * 90 + b"]" * 90)),
    }
    for name, (file, data) in accepted.items():
        yield _analyze(name, file, "accept", data)
    yield _analyze("jsonl/an ending that is unknown", "data.yaml", "refuse", good, "yaml")
    yield train("manifest/half a record", "refuse", damaged("train.jsonl", cut(0.97)), says="line 6")
    yield train("manifest/empty", "refuse", damaged("train.jsonl", nothing_left), says="train.jsonl")


def _record_cases() -> Iterator[Case]:
    """Fields of a record: missing, of a wrong type, of no known meaning."""
    turns: Any = record(0)["conversations"]
    answer = turns[1]
    wrong: dict[str, dict[str, Any]] = {
        "no turns": {"id": 1},
        "no record": {},
        "turns are a text": {"conversations": "hello"},
        "turns are null": {"conversations": None},
        "turns are a number": {"conversations": 7},
        "an empty list of turns": {"conversations": []},
        "a turn that is a text": {"conversations": ["hello", answer]},
        "a turn that is null": {"conversations": [None, answer]},
        "a turn without its text": {"conversations": [{"from": "human"}, answer]},
        "a text that is a number": {"conversations": [{"from": "human", "value": 7}, answer]},
        "a text that is a list": {"conversations": [{"from": "human", "value": ["hello"]}, answer]},
        "a role that is unknown": {"conversations": [{"from": "narrator", "value": "hello"}, answer]},
        "a role that is a number": {"conversations": [{"from": 1, "value": "hello"}, answer]},
        "a role that is a list": {"conversations": [{"from": ["human"], "value": "hello"}, answer]},
        "a role that is a table": {"conversations": [{"from": {"a": 1}, "value": "hello"}, answer]},
        "no answer": {"conversations": turns[:1]},
        "both styles": {"conversations": turns, "messages": turns},
        "a field in a turn": {"conversations": [{**turns[0], "colour": "red"}, answer]},
        "a loss that is a text": {"conversations": [turns[0], {**answer, "loss": "no"}]},
        "a loss that is nan as a text": {"conversations": [turns[0], {**answer, "loss": "nan"}]},
        "a weight of 0.5": {"conversations": [turns[0], {**answer, "weight": 0.5}]},
        "a weight of -1": {"conversations": [turns[0], {**answer, "weight": -1}]},
        "a weight of 1e308": {"conversations": [turns[0], {**answer, "weight": 1e308}]},
        "nothing learned": {"conversations": [turns[0], {**answer, "loss": False}]},
        "a system that is a number": {"conversations": turns, "system": 7},
        "a placeholder without a file": {"conversations": [{"from": "human", "value": "<image>"}, answer]},
        "a file without a placeholder": {"conversations": turns, "image": "media/2.png"},
        "two files for a placeholder": {**record(2, image="media/2.png"), "image": ["media/2.png", "media/3.png"]},
        "a file that is a number": {**record(2, image="media/2.png"), "image": 7},
        "a file that is a table": {**record(2, image="media/2.png"), "image": {"path": "media/2.png"}},
        "a file that is true": {**record(2, image="media/2.png"), "image": True},
        "a list of numbers as files": {**record(2, image="media/2.png"), "image": [7]},
        "a nested list of files": {**record(2, image="media/2.png"), "image": [["media/2.png"]]},
        "both names of a modality": {**record(2, image="media/2.png"), "images": ["media/2.png"]},
        "a name that is nearly one": {**record(0), "imagse": "media/2.png"},
        "tools": {**record(0), "tools": [{"name": "search"}]},
        "videos": {**record(0), "videos": ["a.mp4"]},
        "tokens": {**record(0), "input_ids": [1, 2]},
        "a placeholder of a video": {"conversations": [{"from": "human", "value": "<video>"}, answer]},
        "a placeholder of another spelling": {"conversations": [{"from": "human", "value": "<IMAGE>"}, answer]},
    }
    for name, entry in wrong.items():
        data = as_lines([*records(), entry]).encode()
        yield _analyze(f"record/{name}", "data.jsonl", "refuse", data, "line 7")
    for name, value in {"a number": 7, "a text": "hello", "null": None, "a list": [1], "true": True}.items():
        data = as_lines([*records(), value]).encode()
        yield _analyze(f"record/{name} in its place", "data.jsonl", "refuse", data, "line 7")
    right: dict[str, dict[str, Any]] = {
        "null and empty fields": {**record(0), "image": None, "audio": [], "system": ""},
        "unknown metadata": {**record(0), "source": {"nested": [1, 2.5, None]}, "note": "hello"},
        "an empty question": {"conversations": [{"from": "human", "value": ""}, answer]},
    }
    for name, entry in right.items():
        yield _analyze(f"record/{name}", "data.jsonl", "accept", as_lines([*records(), entry]).encode())


@cache
def _parquet() -> bytes:
    every = [{"image": None, "audio": None, **entry} for entry in records()]
    return _table(pa.Table.from_pylist(every))


def _table(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pa.parquet.write_table(table, file, write_page_checksum=True)
    return file.getvalue()


def _parquet_cases(seed: int) -> Iterator[Case]:
    whole = _parquet()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused: dict[str, Damage] = {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        **{f"cut to {share:.0%}": cut(share) for share in (0.1, 0.5, 0.9, 0.999)},
        "wrong magic": overwrite(-4, b"XXXX"),
        "a footer of 4 GB": overwrite(-8, b"\xff\xff\xff\xff"),
        "a footer of no bytes": overwrite(-8, b"\0\0\0\0"),
        "zeros in its footer": overwrite(footer + 20, bytes(200)),
        "zeros in its pages": overwrite(40, bytes(100)),
        "an encrypted footer": overwrite(-4, b"PARE"),
    }
    for name, damage in refused.items():
        yield _analyze(f"parquet/{name}", "data.parquet", "refuse", damage(whole), r"data\.parquet")
    for number in range(8):
        data = flip(seed + number, 2, 4, footer)(whole)
        yield _analyze(f"parquet/flipped pages {number}", "data.parquet", "refuse", data, r"data\.parquet")
    nested = pa.table({"conversations": pa.array([[{"from": "human", "value": b"\xff"}]])})
    one = {"conversations": [record(0)["conversations"]]}
    tables = {
        "no rows": pa.table({"conversations": pa.array([], pa.list_(pa.string()))}),
        "no columns": pa.table({}),
        "other columns": pa.table({"a": [1, 2]}),
        "texts as bytes": nested,
        "media as bytes": pa.table({**one, "image": pa.array([b"PNG"])}),
        "media as a struct of bytes": pa.table({**one, "image": pa.array([{"bytes": b"PNG", "path": None}])}),
        "a number as media": pa.table({**one, "image": pa.array([1.5])}),
        "turns that are numbers": pa.table({"conversations": pa.array([[1, 2]])}),
        "a column twice": pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]),
        "turns that are null": pa.table({"conversations": pa.array([None], pa.list_(pa.string()))}),
    }
    for name, table in tables.items():
        yield _analyze(f"parquet/{name}", "data.parquet", "refuse", _table(table), r"data\.parquet")
    metadata = pa.table({**one, "score": pa.array([float("nan")]), "when": pa.array([0], pa.timestamp("ns"))})
    yield _analyze("parquet/whole", "data.parquet", "accept", whole)
    yield _analyze("parquet/nan and dates as metadata", "data.parquet", "accept", _table(metadata))


def _tar(members: list[tuple[tarfile.TarInfo | str, bytes]] | None = None, form: int = tarfile.USTAR_FORMAT) -> bytes:
    """A shard of the members, by default of the whole job's records."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for info, data in _members() if members is None else members:
            info = tarfile.TarInfo(info) if isinstance(info, str) else info
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def _members() -> list[tuple[tarfile.TarInfo | str, bytes]]:
    found: list[tuple[tarfile.TarInfo | str, bytes]] = []
    for number, entry in enumerate(records()):
        name = entry.get("image") or entry.get("audio")
        if isinstance(name, str):
            suffix = Path(name).suffix
            found.append((f"{number:03}{suffix}", (whole_job() / name).read_bytes()))
            entry = {**entry, "image" if suffix == ".png" else "audio": f"{number:03}{suffix}"}
        found.append((f"{number:03}.json", json.dumps(entry).encode()))
    return found


def _member(name: str, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def _with_checksum(header: bytes) -> bytes:
    """A tar header with the checksum that its bytes have."""
    total = sum(header[:148]) + 8 * 32 + sum(header[156:])
    return header[:148] + b"%06o\0 " % total + header[156:]


def _sized(octal: bytes) -> bytes:
    """A shard whose second member claims another size."""
    whole = _tar()
    at = 512 + 512 * -(-int(whole[124:135], 8) // 512)
    return whole[:at] + _with_checksum(overwrite(124, octal)(whole[at : at + 512])) + whole[at + 512 :]


def _tar_cases(seed: int) -> Iterator[Case]:
    whole = _tar()
    text_only = json.dumps(record(0)).encode()
    pair = [("a.json", text_only), ("b.json", text_only)]
    refused: dict[str, bytes] = {
        "empty": b"",
        "zeros": zeros(whole),
        "a web page": text(whole),
        **{f"cut to {share:.0%}": cut(share)(whole) for share in (0.01, 0.1, 0.25, 0.5, 0.75)},
        "cut between two members": _between(whole),
        "cut in a header": _between(whole) + whole[:100],
        "a wrong checksum": overwrite(148, b"000000\0 ")(whole),
        "a size that is no number": _sized(b"99999999999\0"),
        "a negative size": _sized(b"\xff" * 11 + b"\x00"),
        "a size of 8 GB": _sized(b"77777777777\0"),
        "a size of 2^70": _sized(b"\x80\0\0\x40" + b"\0" * 8),
        "joined with another": whole + _tar([("z.json", text_only)]),
        "gzip": gzip.compress(whole),
        "a sample without a record": _tar([("a.png", b"x"), *pair[1:]]),
        "two records of a sample": _tar([("a.json", text_only), ("a.JSON", text_only)]),
        "a member twice": _tar([("a.json", text_only), ("a.json", text_only)]),
        "a sample in two places": _tar([*pair, ("a.txt", b"x")]),
        "a link": _tar([*pair, (_member("a.png", type=tarfile.SYMTYPE, linkname="b.png"), b"")]),
        "a hard link": _tar([*pair, (_member("a.png", type=tarfile.LNKTYPE, linkname="b.png"), b"")]),
        "a device as a member": _tar([*pair, (_member("a.png", type=tarfile.CHRTYPE), b"")]),
        "sparse": _tar([*pair, (_member("c.json", type=tarfile.GNUTYPE_SPARSE), text_only)], tarfile.GNU_FORMAT),
        "a record that is no JSON": _tar([("a.json", b"{")]),
        "an empty record": _tar([("a.json", b"")]),
        "a record that names what is not there": _tar([("a.json", json.dumps(record(2, image="b.png")).encode())]),
        "a record that names a file outside": _tar(
            [("a.png", b"x"), ("a.json", json.dumps(record(2, image="../media/2.png")).encode())]
        ),
        "only folders": _tar([(_member("a", type=tarfile.DIRTYPE), b"")]),
    }
    for name, data in refused.items():
        yield _analyze(f"tar/{name}", "data.tar", "refuse", data, r"data\.tar")
    for number in range(6):
        data = flip(seed + number, 1, 0, 148)(whole[:512]) + whole[512:]
        yield _analyze(f"tar/flipped in a header {number}", "data.tar", "refuse", data, r"data\.tar")
    broken = [(name, b"no picture" if str(name).endswith(".png") else data) for name, data in _members()]
    accepted = {
        "whole": whole,
        "pax": _tar(form=tarfile.PAX_FORMAT),
        "gnu": _tar(form=tarfile.GNU_FORMAT),
        "names of 300 characters": _tar([(f"{'a' * 300}.json", text_only)], tarfile.PAX_FORMAT),
        "names that climb": _tar([("../../a.json", text_only)]),
        "zeros behind its end": whole + bytes(1 << 20),
        "a folder beside the samples": _tar([(_member("a", type=tarfile.DIRTYPE), b""), *pair]),
    }
    for name, data in accepted.items():
        yield _analyze(f"tar/{name}", "data.tar", "accept", data)
    yield _analyze("tar/media that are broken", "data.tar", "accept", _tar(broken), "left out")
    sets = ("data.train=['train.tar']", "data.max_bad_fraction=1")
    yield train(
        "tar/broken media", "accept", _put("train.tar", _tar(broken)), *sets, says=r"Left out[^\n]*002\.png: \S"
    )
    yield train("tar/cut off", "refuse", _put("train.tar", cut(0.6)(whole)), *sets, says=r"train\.tar")
    for name, spec in {
        "braces that name 10^18 shards": "train-{0..999999999999999999}.tar",
        "braces in braces": "train-{a{0..9}}.tar",
        "a range that runs backwards": "train-{9..0}.tar",
        "a shard that is missing": "{train,absent}.tar",
        "a pattern that matches nothing": "absent-*.tar",
        "a pattern that matches a folder": "med*",
    }.items():
        given = (f"data.train=['{spec}']",)
        yield train(f"tar/{name}", "refuse", _put("train.tar", whole), *given)


def _between(whole: bytes) -> bytes:
    """A shard that was cut off behind its first member."""
    return whole[: 512 + 512 * -(-int(whole[124:135], 8) // 512)]


def _put(name: str, data: bytes) -> Change:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return change


def _table_cases() -> Iterator[Case]:
    """CSV of lengths."""

    def number(value: str) -> bytes:
        return replace(b"\n20,", f"\n{value},".encode())(_TABLE)

    refused = {
        "empty": b"",
        "names alone": _TABLE.partition(b"\n")[0],
        "zeros": zeros(_TABLE),
        "a web page": text(_TABLE),
        "a row that is short": _TABLE + b"1,2\n",
        "a row that is long": _TABLE + b"1,2,3,4,5\n",
        "a name twice": _TABLE.replace(b"image_width", b"text_tokens"),
        "a name that is nearly one": _TABLE.replace(b"image_width", b"image_widht"),
        "no name that is known": _TABLE.replace(b"text_tokens,image_width,image_height,audio_seconds", b"a,b,c,d"),
        "semicolons": _TABLE.replace(b",", b";"),
        "UTF-16": _TABLE.decode().encode("utf-16"),
        "a byte that is not UTF-8": _TABLE.replace(b"\n9", b"\n\xff9"),
        "quotes that do not close": _TABLE.replace(b"\n9", b'\n"9'),
        "a field of 10 MB": _TABLE.replace(b"\n9", b"\n" + b"9" * 10_000_000),
        **{
            f"{value} tokens": number(value)
            for value in (
                "-1",
                "nan",
                "inf",
                "-inf",
                "1e30",
                "1e999",
                "9" * 5000,
                "0x10",
                "1,5",
                "many",
                "1e11",
                "٣٣e9",
            )
        },
        "-1 seconds": _TABLE.replace(b"1.5", b"-1"),
        "1e300 seconds": _TABLE.replace(b"1.5", b"1e300"),
        "10^9 images": b"num_images,image_tokens\n1000000000,5\n",
        "zeros behind": _TABLE + bytes(100),
    }
    for name, data in refused.items():
        yield _analyze(f"csv/{name}", "data.csv", "refuse", data, r"data\.csv")
    packed = gzip.compress(_TABLE, mtime=0)
    for name, damage in {
        "cut to a half": cut(0.5),
        "empty": nothing_left,
        "zeros": zeros,
        "text": lambda _: _TABLE,
    }.items():
        yield _analyze(f"csv.gz/{name}", "data.csv.gz", "refuse", damage(packed), r"data\.csv")
    flipped = overwrite(-6, bytes([packed[-6] ^ 1]))(packed)
    yield _analyze("csv.gz/a wrong checksum", "data.csv.gz", "refuse", flipped, r"data\.csv")
    accepted = {
        "whole": _TABLE,
        "a byte order mark": b"\xef\xbb\xbf" + _TABLE,
        "line ends of Windows": _TABLE.replace(b"\n", b"\r\n"),
        "a row with nothing in it": _TABLE + b",,,\n",
        "metadata": _TABLE.replace(b"audio_seconds", b"task").replace(b"1.5", b"talk").replace(b",2\n", b",walk\n"),
        "underscores and signs of numbers": number("+2e1"),
    }
    for name, data in accepted.items():
        yield _analyze(f"csv/{name}", "data.csv", "accept", data)
