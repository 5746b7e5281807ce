"""Damaged directories of tokenizers: each ends in one sentence that names the file."""

import contextlib
import json
import os
import random

import pytest

from motet.core.errors import UserError
from motet.data.conversation import parse_conversation
from motet.data.text import ChatTokenizer
from unit.data.families import CHATML, IM, write_tokenizer
from unit.data.samples import a_record

TEMPLATE = CHATML.replace("MEDIA", "")
ASKED = parse_conversation(a_record(), "here")


@pytest.fixture
def folder(tmp_path):
    return write_tokenizer(tmp_path / "tok", TEMPLATE, IM, {"eos_token": "<|im_end|>"})


def complaint(folder) -> str:
    with pytest.raises(UserError) as caught:
        ChatTokenizer.from_directory(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "").replace(f"{folder}", "tok")


DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            b"",
            "tokenizer.json: is no tokenizer of the tokenizers library (EOF while parsing a value at line 1 column 0)",
        ),
        (b"{}", "tokenizer.json: is no tokenizer of the tokenizers library (Model missing."),
        (b"[]", "tokenizer.json: is no tokenizer of the tokenizers library (invalid type: sequence"),
        (DEEP, "tokenizer.json: is no tokenizer of the tokenizers library ("),
        (b"\x89PNG", "Cannot read the tokenizer tokenizer.json: it is not UTF-8 (byte 0); save it as UTF-8."),
        ("{}".encode("utf-16"), "Cannot read the tokenizer tokenizer.json: it is UTF-16; save it as UTF-8."),
        (b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}', "is a tokenizer without a single token"),
    ],
)
def test_damaged_tokenizers(folder, data, said):
    (folder / "tokenizer.json").write_bytes(data)
    assert said in complaint(folder)


def test_tokenizers_that_are_cut_or_garbled(folder):
    """Whatever is cut off or overwritten: a sentence, or a tokenizer that works."""
    whole = (folder / "tokenizer.json").read_bytes()
    rng = random.Random(0)
    for _ in range(60):
        data = bytearray(whole)
        at = rng.randrange(len(data))
        data[at : at + rng.choice((1, 7, len(data)))] = rng.choice((b"", b"0", b"null", b"{", b'"'))
        (folder / "tokenizer.json").write_bytes(data)
        with contextlib.suppress(UserError):
            ChatTokenizer.from_directory(folder).encode(ASKED)


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "chat_template.json"]
)
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty, but must be JSON"),
        (b"[]", "must hold a JSON object"),
        (b"{", "is no JSON"),
        (b"\xff\xfe{", "is UTF-16"),
        (DEEP, "nests lists and tables more than 100 deep"),
    ],
)
def test_damaged_files_beside_it(folder, name, data, said):
    (folder / name).write_bytes(data)
    assert complaint(folder).startswith(f"{name}: {said}")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"eos_token": 3}, "tokenizer_config.json: 'eos_token' is '3', which tokenizer.json does not hold"),
        ({"eos_token": {"content": "<no>"}}, "'eos_token' is '<no>', which tokenizer.json does not hold; save the"),
        ({"extra_special_tokens": {"image_token": "<no>"}}, "'image_token' is '<no>', which tokenizer.json does not"),
        (
            {"added_tokens_decoder": {"999": {"content": "<new>"}}},
            "tokenizer_config.json: has '<new>' as token 999, which tokenizer.json has not; save the tokenizer anew",
        ),
        (
            {"added_tokens_decoder": {"0": {"content": "<|im_end|>"}}},
            "tokenizer_config.json: has '<|im_end|>' as token 0, which tokenizer.json has not",
        ),
        ({"additional_special_tokens": ["<|im_end|>", "<new>"]}, "has '<new>', which tokenizer.json has not"),
        ({"added_tokens_decoder": [1]}, "'added_tokens_decoder' must be an object"),
        (
            {"split_special_tokens": True},
            "tokenizer_config.json: has 'split_special_tokens', by which transformers makes",
        ),
    ],
)
def test_tokens_that_the_tokenizer_does_not_have(folder, config, said):
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert said in complaint(folder)


def test_tokens_added_by_an_older_file(folder):
    (folder / "added_tokens.json").write_text('{"<|im_end|>": 2}')
    ChatTokenizer.from_directory(folder)
    (folder / "added_tokens.json").write_text('{"<|im_end|>": 2, "<new>": 3}')
    assert complaint(folder).startswith("added_tokens.json: has '<new>' as token 3, which tokenizer.json has not")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (3, "tokenizer_config.json: 'chat_template' must be a text, or several, of which one is named 'default'"),
        (["a"], "tokenizer_config.json: 'chat_template' has several templates, of which none is named 'default'"),
        ([{"name": "tool_use", "template": "x"}], "of which none is named 'default'"),
        ([{"name": "default", "template": 3}], "'chat_template' must be a text, or several"),
        ("{% for %}", "tokenizer tok: the tokenizer's chat template is no Jinja (line 1"),
        ("", "tokenizer_config.json: its chat template is empty; write one, or remove it for a plain one"),
        (None, "tokenizer tok: the tokenizer has no chat template and no eos_token; give it one of them"),
    ],
)
def test_damaged_templates(folder, given, said):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    assert said in complaint(folder)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "processor_config.json"])
def test_what_stands_in_the_place_of_a_file_is_not_passed_over(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert "is a pipe, not a regular file" in complaint(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("nowhere")
    assert "No such file or directory" in complaint(folder)


def test_a_pipe_by_the_name_of_a_tokenizer_is_not_waited_for(folder):
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    assert "tokenizer.json: it is a pipe, not a regular file" in complaint(folder)


def test_the_template_is_the_processors_before_the_tokenizers(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))

    def used() -> str:
        return ChatTokenizer.from_directory(folder)._template.source

    assert used() == TEMPLATE
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    assert used() == TEMPLATE
    (folder / "chat_template.jinja").unlink()
    assert used() == TEMPLATE
    (folder / "processor_config.json").write_text(json.dumps({"chat_template": "{{ 'other' }}"}))
    assert complaint(folder) == (
        "chat_template.json and processor_config.json hold different chat templates; remove one of them"
    )
    (folder / "chat_template.json").unlink()
    assert used() == "{{ 'other' }}"
    (folder / "processor_config.json").unlink()
    several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert used() == "y"


def test_a_directory_of_an_older_format_that_is_broken(tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "old"
    folder.mkdir()
    assert complaint(folder).startswith("tokenizer tok: cannot be opened by transformers (")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    (folder / "vocab.json").write_text("[3]")
    (folder / "merges.txt").write_text("#version\nx")
    assert complaint(folder).startswith("tokenizer tok: cannot be opened by transformers (")


@pytest.mark.parametrize("named", [{}, {"tokenizer_class": "PreTrainedTokenizerFast"}])
def test_a_class_that_transformers_takes_for_the_model_beside_it(folder, named):
    """Of a Qwen2 it is Qwen2Tokenizer, which composes accents and splits in its own way, whatever the file says."""
    transformers = pytest.importorskip("transformers")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", **named}))
    text = "cafe\u0301 12345's\n\n x"
    alone = ChatTokenizer.from_directory(folder).backend.encode(text)[0].tolist()
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    theirs = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    assert ChatTokenizer.from_directory(folder).backend.encode(text)[0].tolist() == theirs != alone


def test_flags_of_tokens_are_those_that_transformers_takes(folder):
    """A mark takes the white space behind it, by the one file and not by the other."""
    transformers = pytest.importorskip("transformers")
    text = "<|im_start|>  user\nYes<|im_end|>"
    alone = ChatTokenizer.from_directory(folder).backend.encode(text)[0].tolist()
    number = str(ChatTokenizer.from_directory(folder).backend.token_id("<|im_start|>"))
    for rstrip in (False, True):
        said = {"content": "<|im_start|>", "special": True, "normalized": False, "rstrip": rstrip}
        config = {"eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"added_tokens_decoder": {number: said}}))
        theirs = transformers.AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
        ours = ChatTokenizer.from_directory(folder).backend.encode(text)[0].tolist()
        assert ours == theirs
        assert (ours == alone) != rstrip
