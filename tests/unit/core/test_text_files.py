"""Damaged JSON and TOML: each way ends in one sentence that names the place."""

import os

import pytest

from motet.core.errors import UserError
from motet.core.text_files import parse_json, parse_toml, read_json, read_text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty, but must be JSON"),
        (b" \n", "is empty, but must be JSON"),
        (b"{", "is no JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b'{"a": 1} x', "is no JSON (Extra data, column 10)"),
        (b'{"a": "\x00"}', "is no JSON (Invalid control character at, column 8)"),
        (b"\x89PNG\r\n", "is not UTF-8 (byte 0); save it as UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "is not UTF-8 (byte 7); save it as UTF-8"),
        (rb'{"a": "\ud83d"}', r"has half of a character (\ud83d or the like without its other half)"),
        (rb'{"a\udc00": 1}', r"has half of a character (\udc00 or the like without its other half)"),
        (b"[" * 100_000, "nests lists and tables more than 100 deep"),
        (b'{"a":' * 100_000, "nests lists and tables more than 100 deep"),
        (b"[" * 500 + b"]" * 500, "nests lists and tables more than 100 deep"),
        (b'{"a": ' + b"1" * 5000 + b"}", "has a number of more than 4,300 digits"),
        (b"[NaN]", "has NaN, for which JSON has no word; write a finite number or null"),
        (b"[-Infinity]", "has -Infinity, for which JSON has no word; write a finite number or null"),
        (b"[1e999]", "has the number 1e999, which is too large"),
        (b'{"a": {"b": 1, "b": 2}}', "has the key 'b' twice in one object; each key must stand once"),
    ],
)
def test_damaged_json(data, said, tmp_path):
    with pytest.raises(UserError) as caught:
        parse_json(data, "here")
    assert str(caught.value) == f"here: {said}"
    (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError) as caught:
        read_json(tmp_path / "a.json")
    assert str(caught.value).startswith(str(tmp_path / "a.json"))


def test_a_line_is_named_where_there_are_several():
    with pytest.raises(UserError, match=r"^here, line 3: is no JSON \(Expecting value, column 6\)$"):
        parse_json(b'{\n"a": 1,\n"b": ,\n}', "here")


def test_json_that_is_whole():
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 2.5, null]}\r\n', "here") == {"a": [1, 2.5, None]}
    assert parse_json(rb'"\ud83d\ude00 \\ud83d"', "here") == "\U0001f600 \\ud83d"
    assert parse_json(b"[" * 100 + b"]" * 100, "here")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a = ", "is no valid TOML: Invalid value"),
        ("a = " + "[" * 100_000, "nests lists and tables more than 100 deep"),
        ("a." * 5000 + "b = 1", "nests lists and tables more than 100 deep"),
        ("a." * 200 + "b = 1", "nests lists and tables more than 100 deep"),
        ("a = " + "1" * 5000, "has a number of more than 4,300 digits"),
        ("a = 1e999", "has the number 1e999, which is too large"),
        ('a = "\\ud800"', "is no valid TOML: Escaped character is not a Unicode scalar value"),
        ("a = 1\na = 2", "is no valid TOML: Cannot overwrite a value"),
    ],
)
def test_damaged_toml(text, said):
    with pytest.raises(UserError) as caught:
        parse_toml(text, "here")
    assert str(caught.value).startswith(f"here: {said}")


def test_a_null_character_is_refused_where_it_is_one():
    for text in (r'a = "b\u0000"', r'a = [{b = "\U00000000"}]', r'"a\u0000" = 1'):
        with pytest.raises(UserError, match=r"^here: has a null character \(\\u0000\) in a text"):
            parse_toml(text, "here")
    assert parse_toml(r"a = 'b\u0000'", "here") == {"a": r"b\u0000"}


def test_toml_that_is_whole():
    assert parse_toml("a = inf\nb = 2.5", "here") == {"a": float("inf"), "b": 2.5}


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffa = 1\r\nb".encode())
    assert read_text(tmp_path / "a") == "a = 1\nb"
    (tmp_path / "b").write_bytes("a".encode("utf-16"))
    with pytest.raises(UserError, match=r"^Cannot read the recipe .*/b: it is UTF-16; save it as UTF-8\.$"):
        read_text(tmp_path / "b", "the recipe")
    for read in (read_text, read_json):
        with pytest.raises(UserError, match=r"^Cannot read the file .*/none: No such file or directory\.$"):
            read(tmp_path / "none")
        with pytest.raises(UserError, match=r"it is a directory, not a regular file\.$"):
            read(tmp_path)
        with pytest.raises(UserError, match="null"):
            read(tmp_path / "a\0b")


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for read in (read_text, read_json):
        with pytest.raises(UserError, match=r"pipe: it is a pipe, not a regular file\.$"):
            read(tmp_path / "pipe")
        with pytest.raises(UserError, match=r"device: it is a device, not a regular file\.$"):
            read(tmp_path / "device")
