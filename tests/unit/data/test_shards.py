"""A tar shard is read whole or refused: nothing of it is lost without a word."""

import io
import json
import os
import random
import tarfile

import numpy as np
import pytest
import soundfile

from motet.core.errors import UserError
from motet.data.index_build import open_index
from motet.data.manifest import Manifest
from motet.data.shards import expand_shards, read_shard
from unit.data.samples import a_record, write_image

BLOCK = tarfile.BLOCKSIZE


def a_shard(num_samples: int = 3, kind: int = tarfile.DEFAULT_FORMAT, **renamed: str) -> bytes:
    """A shard of small samples; `renamed`: other names for some of its members."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w", format=kind) as tar:
        for number in range(num_samples):
            # A long name takes a header of its own.
            folder = "d/" + "x" * (150 if number == 1 else 1)
            members = {f"{number}.png": bytes([number]) * (300 + 400 * number), f"{number}.json": b"{}"}
            for name, data in members.items():
                member = tarfile.TarInfo(renamed.get(f"n{name.replace('.', '_')}", f"{folder}/{name}"))
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return shard.getvalue()


def read(tmp_path, data: bytes) -> list:
    (tmp_path / "a.tar").write_bytes(data)
    return list(read_shard(tmp_path / "a.tar"))


def refused(tmp_path, data: bytes) -> str:
    with pytest.raises(UserError) as error:
        read(tmp_path, data)
    return str(error.value).removeprefix(f"{tmp_path}/a.tar")


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_no_cut_through_a_shard_goes_unnoticed(tmp_path, kind):
    data = a_shard(kind=kind)
    whole = read(tmp_path, data)
    assert len(whole) == 3
    end = -(-len(data.rstrip(b"\0")) // BLOCK) * BLOCK
    cuts = {*range(0, end + 2 * BLOCK, 61), *range(0, end + BLOCK, BLOCK), end + BLOCK - 1}
    for cut in cuts:
        if cut < end + BLOCK:
            refused(tmp_path, data[:cut])
        else:
            assert read(tmp_path, data[:cut]) == whole, "all of it is there, and one of the blocks that say so"


def test_what_a_cut_shard_is_told(tmp_path):
    data = a_shard()
    end = -(-len(data.rstrip(b"\0")) // BLOCK) * BLOCK
    assert refused(tmp_path, data[:end]) == (
        f": is cut off: it ends after {end:,} bytes without the empty blocks that end a tar file; write it anew"
    )
    assert "is no whole, uncompressed tar file (unexpected end of data)" in refused(tmp_path, data[: end - 1])


def test_a_damaged_header_does_not_end_a_shard(tmp_path):
    data = bytearray(a_shard())
    data[2 * BLOCK + 148] ^= 1
    assert refused(tmp_path, bytes(data)) == ": is damaged at byte 1,024, where a member must begin; write it anew"


def test_joined_shards_are_not_read_for_the_first_of_them(tmp_path):
    assert "holds more behind its end at byte" in refused(tmp_path, a_shard() + a_shard())


def test_no_damage_of_headers_hangs_or_raises_anything_else(tmp_path):
    data, rng = a_shard(kind=tarfile.PAX_FORMAT), random.Random(0)
    num_blocks = len(data.rstrip(b"\0")) // BLOCK
    num_refused = 0
    for _ in range(400):
        damaged = bytearray(data)
        start = rng.randrange(num_blocks) * BLOCK
        damaged[start + rng.choice([rng.randrange(BLOCK), rng.randrange(124, 136), 156])] = rng.randrange(256)
        header = damaged[start : start + BLOCK]
        # With a checksum that is right, so that what it says is believed.
        damaged[start + 148 : start + 156] = b"%06o\0 " % (sum(header[:148]) + 256 + sum(header[156:]))
        try:
            read(tmp_path, bytes(damaged))
        except UserError:
            num_refused += 1
    assert num_refused > 100


def test_a_size_below_zero_does_not_lead_in_circles(tmp_path):
    data = bytearray(a_shard())
    data[124:136] = (-BLOCK & (1 << 96) - 1).to_bytes(12, "big")
    data[148:156] = b"%06o\0 " % (sum(data[:148]) + 256 + sum(data[156:BLOCK]))
    assert "damaged" in refused(tmp_path, bytes(data)) or "no whole" in refused(tmp_path, bytes(data))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_member_that_has_no_bytes_of_its_own_is_named(tmp_path, kind):
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        for name in ("0.png", "README"):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "" if kind == tarfile.FIFOTYPE else "elsewhere.png"
            tar.addfile(member)
    what = "no regular file" if kind == tarfile.FIFOTYPE else "a link"
    assert f": member 0.png is {what}, so its bytes are not in one place" in refused(tmp_path, shard.getvalue())


def test_other_things_in_a_shard_are_not_looked_at(tmp_path):
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        folder, link, record = (tarfile.TarInfo(name) for name in ("d", "d/README", "d/0.json"))
        folder.type, link.type, link.linkname, record.size = tarfile.DIRTYPE, tarfile.SYMTYPE, "elsewhere", 2
        for member in (folder, link, record):
            tar.addfile(member, io.BytesIO(b"{}"))
    assert read(tmp_path, shard.getvalue()) == [("d/0", b"{}", ())]


@pytest.mark.parametrize("name", ["0.avif", "0.jfif", "0.dib", "0.pbm", "0.JPE", "0.aiff", "0.aif", "0.rf64", "0.oga"])
def test_members_of_every_format_that_is_read_are_media(tmp_path, tokenizer, name):
    ending = name.lower().partition(".")[2]
    if ending in ("avif", "jfif", "dib", "pbm", "jpe"):
        kind = {"jfif": "JPEG", "jpe": "JPEG", "pbm": "PPM"}.get(ending, ending.upper())
        write_image(tmp_path / name, format=kind)
    else:
        kind = {"aif": "AIFF", "oga": "OGG"}.get(ending, ending.upper())
        soundfile.write(tmp_path / name, np.zeros(100, dtype=np.float32), 16_000, format=kind)
    (tmp_path / "0.txt").write_text("A cat.")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for member in (name, "0.txt"):
            tar.add(tmp_path / member, member)
    index = open_index(tmp_path / "a.tar", tokenizer)
    assert not list(index.bad_examples())
    assert [ref.member for ref in index.media_refs(0)] == [name]


def test_samples_that_are_not_of_a_piece(tmp_path):
    assert refused(tmp_path, a_shard(n1_png="d/x/0.left.png", n1_json="d/x/0.JSON")).startswith(
        ", key d/x/0: has 2 .json files"
    )
    apart = a_shard(n2_png="d/x/0.left.png", n2_json="d/x/0.json")
    assert refused(tmp_path, apart) == ", key d/x/0: stands in two places; the files of a sample must be adjacent"
    twice = a_shard(n0_json="d/x/0.png")
    assert refused(tmp_path, twice).startswith(", key d/x/0: holds d/x/0.png 2 times")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("a-{0..999999999}.tar", "its braces name 1,000,000,000 shards, more than 100,000"),
        ("a-" + "{0,1}" * 40 + ".tar", "its braces name 1,099,511,627,776 shards"),
        ("a-{0..9}{0..99999}.tar", "its braces name 1,000,000 shards"),
        ("a-{b{0..9},c}.tar", "has braces within braces"),
        ("a-{0..99999999999999999999999}.tar", "there is no such file"),
    ],
)
def test_braces_that_name_too_much(tmp_path, pattern, message):
    with pytest.raises(UserError, match=message):
        Manifest.find(tmp_path / pattern)


def test_what_is_no_shard_is_not_waited_for_and_not_skipped(tmp_path, tokenizer):
    (tmp_path / "d").mkdir()
    os.mkfifo(tmp_path / "d" / "a.tar")
    for spec in ("d", "d/a.tar", "d/*.tar", "d/{a,a}.tar"):
        with pytest.raises(UserError, match=r"a\.tar is a pipe, but must be a regular file"):
            open_index(tmp_path / spec, tokenizer)
    (tmp_path / "d" / "a.tar").unlink()
    (tmp_path / "d" / "a.tar.lz").write_bytes(b"")
    for spec in ("d/a*", "d/{a.tar.lz,a.tar.lz}"):
        with pytest.raises(UserError, match=r"a\.tar\.lz: its ending '\.lz' is unknown; it must be \.json, \.jsonl"):
            open_index(tmp_path / spec, tokenizer)
    with pytest.raises(UserError, match="cannot be read"):
        open_index(tmp_path / ("x" * 5000), tokenizer)
    with pytest.raises(UserError, match="is a device, but must be a regular file"):
        open_index("/dev/zero", tokenizer)


def test_the_order_of_braces(tmp_path):
    for name in ("b-2", "b-1", "a-1", "a-2"):
        (tmp_path / f"{name}.tar").write_bytes(b"")
    found = expand_shards(tmp_path / "{b,a}-{1..2}.tar")
    assert [path.stem for path in found] == ["b-1", "b-2", "a-1", "a-2"]


def test_a_cut_shard_among_whole_ones_is_named(tmp_path, tokenizer):
    for number in range(3):
        shard = io.BytesIO()
        with tarfile.open(fileobj=shard, mode="w") as tar:
            data = json.dumps(a_record()).encode()
            member = tarfile.TarInfo("0.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        (tmp_path / f"{number}.tar").write_bytes(shard.getvalue()[: BLOCK * 2 if number == 1 else None])
    with pytest.raises(UserError, match=r"1\.tar: is cut off"):
        open_index(tmp_path / "{0..2}.tar", tokenizer)
