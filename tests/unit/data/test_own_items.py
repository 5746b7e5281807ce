"""Modalities of the user's own: what is refused of their files, and what becomes of records and items."""

import io
import json
import pickle
import sys
import tarfile

import numpy as np
import pytest

import motet.core.modalities as known
from motet.core.errors import UserError
from motet.core.modalities import modalities, own_modality
from motet.data.conversation import media_names, parse_conversation
from motet.data.dataset import Dataset
from motet.data.headers import read_header
from motet.data.media import BadMedia, MediaRef, modality_of
from motet.data.modality import Modality
from motet.data.own_items import OwnTransform
from motet.data.ray_actors import HandlerActor
from motet.data.transforms import load_media
from motet.data.worker_process import pickled, unpickled
from motet.train.recipe.recipe_file import load_recipe

FILE = """
import numpy as np

ROW_DIM = 2
SUFFIXES = (".csv",)

def read_header(file):
    return int(file.readline())

def load(file):
    file.readline()
    return np.loadtxt(file, delimiter=",", ndmin=2)
"""
RECIPE = """
[run]
dir = "run"
steps = 1
batch_size = 1
[data]
train = ["train.jsonl"]
tokenizer = "tokenizer"
[optimizer]
lr = 1e-3
[modalities.traces]
file = "traces.py"
[model.backbone]
family = "qwen2"
[model.encoders.traces]
module = "encoder.py:Encoder"
"""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch):
    """What a test lets this process know, other tests do not."""
    monkeypatch.setattr(known, "_OWN", {})


@pytest.fixture
def traces(tmp_path):
    (tmp_path / "traces.py").write_text(FILE)
    return own_modality("traces", tmp_path / "traces.py")


def turns(text):
    return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "Yes."}]}


def test_a_record_names_items_of_an_own_modality(traces):
    record = turns("<traces> and <image>") | {"traces": "a.csv", "image": "a.png"}
    assert parse_conversation(record, "line 1").placeholders == ("traces", "image")
    assert media_names(record, "line 1") == {"image": ["a.png"], "audio": None, "video": None, "traces": ["a.csv"]}
    parts = [{"type": "traces", "path": "a.csv"}, {"type": "text", "text": "?"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Yes."}]
    conversation = parse_conversation({"messages": messages}, "line 1")
    assert (conversation.placeholders, conversation.names) == (("traces",), ("a.csv",))
    with pytest.raises(UserError, match="has a field 'trace': is it meant to be 'traces'"):
        parse_conversation(turns("?") | {"trace": "a.csv"}, "line 1")
    assert modality_of("x/a.CSV") == "traces"


def test_without_the_modality_its_placeholder_is_text():
    assert parse_conversation(turns("<traces>") | {"traces": "a.csv"}, "line 1").placeholders == ()


def test_items_are_read_by_the_users_functions(traces, tmp_path):
    (tmp_path / "a.csv").write_text("2\n1,2\n3,4\n")
    ref = MediaRef("traces", str(tmp_path / "a.csv"))
    assert read_header(ref) == (2, 0)
    media = load_media(ref, OwnTransform(traces))
    assert media.values.tolist() == [[1, 2], [3, 4]] and media.values.dtype == np.float32 and media.size.tolist() == [2]
    for text, reason in (
        ("3\n1,2\n3,4\n", r"has size \[2\], its header at indexing promised \[3\]"),
        ("1\n1,2,3\n", r"becomes float64 \[1, 3\] by load of traces.py; it must be numbers \[rows, 2\]"),
        ("1\nnan,2\n", "values that are not finite"),
    ):
        (tmp_path / "a.csv").write_text(text)
        promised = MediaRef("traces", ref.path, raw=read_header(ref))
        with pytest.raises(BadMedia, match=reason):
            load_media(promised, OwnTransform(traces))
    for text, reason in (("0\n", "has 0 rows by read_header of traces.py"), ("x\n", "ValueError: invalid literal")):
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(BadMedia, match=reason):
            read_header(ref)


def test_a_process_knows_a_modality_that_comes_to_it(traces, monkeypatch):
    sent = pickle.dumps(OwnTransform(traces))
    monkeypatch.setattr(known, "_OWN", {})
    assert pickle.loads(sent).modality == "traces"
    assert modalities() == ("image", "audio", "video", "traces")


def loader_of(transform):
    return lambda task: load_media(task, transform)


def test_an_actor_whose_file_differs_says_so_before_it_decodes(traces, tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text("1\n1,2\n")
    head, contents = pickled((loader_of, (OwnTransform(traces),)))
    file = f"{tmp_path}/traces.py"
    for text, said in (
        (FILE, ""),
        (
            FILE.replace("file.readline()\n    return np", "file.readline()\n    return 2 * np"),
            f"{file} is not the file",
        ),
        ("broken", f"{file} cannot be imported (NameError: "),
        (None, f"there is no file {file}"),
    ):
        monkeypatch.setattr(known, "_OWN", {})  # As on another node.
        for name in [name for name in sys.modules if name.startswith("traces_")]:
            monkeypatch.delitem(sys.modules, name)
        traces.file.unlink() if text is None else traces.file.write_text(text)
        actor = HandlerActor(head, list(map(bytes, contents)))
        failure = actor.failure
        assert said in failure
        assert bool(said) == bool(failure)
        assert failure.startswith("modalities.traces") or not failure
        if not failure:
            result, *arrays = actor.run(MediaRef("traces", str(tmp_path / "a.csv"), raw=(1, 0)))
            assert unpickled(result, [each.data for each in arrays])[1].values.tolist() == [[1, 2]]


def test_an_index_is_of_the_modalities_that_were_known(traces, tmp_path, tokenizer, monkeypatch):
    """Members of a shard are found by their ending. Another text of the file makes another index, of the same data."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, data in (("0.json", json.dumps(turns("<traces>?"))), ("0.csv", "2\n1,2\n3,4\n")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data.encode()))

    def opened(own):
        rows = Modality(OwnTransform(own), lambda sizes: sizes[:, 0], lambda sizes: sizes[:, 0])
        return Dataset.open([tmp_path / "a.tar"], tokenizer, {"traces": rows})

    first = opened(traces)
    assert first.batch_lengths(np.array([0]), 1).items["traces"].length.tolist() == [2]
    (tmp_path / "traces.py").write_text(FILE.replace("return int(file.readline())", "return 1 + int(file.readline())"))
    monkeypatch.setattr(known, "_OWN", {})
    for name in [name for name in sys.modules if name.startswith("traces_")]:
        monkeypatch.delitem(sys.modules, name)
    second = opened(own_modality("traces", tmp_path / "traces.py"))
    assert second.batch_lengths(np.array([0]), 1).items["traces"].length.tolist() == [3]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ROW_DIM = 2", r"has no function read_header\(file\)"),
        (FILE.replace("ROW_DIM = 2", "ROW_DIM = 0"), "ROW_DIM is 0; set it to the width of a row"),
        (FILE.replace('(".csv",)', '"csv"'), "SUFFIXES is 'csv'; it must be endings"),
        ("import nothing_of_this_name", "cannot be imported .ModuleNotFoundError"),
        (None, "there is no file"),
    ],
)
def test_a_file_that_lacks_a_part_is_refused(tmp_path, text, reason):
    if text is not None:
        (tmp_path / "wrong.py").write_text(text)
    with pytest.raises(UserError, match=reason):
        own_modality("traces", tmp_path / "wrong.py")
    assert modalities() == ("image", "audio", "video")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("modalities.traces", "modalities.image", "'image' cannot name a modality"),
        ("modalities.traces", "modalities.tools", "'tools' cannot name a modality"),
        ("modalities.traces", "modalities.text", "'text' cannot name a modality"),
        ("modalities.traces", "modalities.others", "modalities.others has no effect, as there is no model.encoders"),
        ('file = "traces.py"', 'file = "none.py"', "there is no file"),
        (
            "[model.encoders.traces]",
            "[model.encoders.t]\nreads = 'depth'",
            r"or traces, or have a table \[modalities.depth\]",
        ),
        (
            "[model.backbone]",
            "[transforms.traces]\npatch_size = 4\n[model.backbone]",
            "the file of modalities.traces says",
        ),
    ],
)
def test_recipes_are_refused_in_a_sentence(tmp_path, old, new, reason):
    (tmp_path / "traces.py").write_text(FILE)
    assert old in RECIPE
    (tmp_path / "recipe.toml").write_text(RECIPE.replace(old, new))
    with pytest.raises(UserError, match=reason):
        load_recipe(tmp_path / "recipe.toml")


def test_files_of_a_recipe_lie_beside_it(tmp_path):
    (tmp_path / "traces.py").write_text(FILE)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = load_recipe(tmp_path / "recipe.toml")
    assert recipe.model.encoders["traces"].module == f"{tmp_path}/encoder.py:Encoder"
    assert recipe.transform("traces").row_dim == 2
    other = tmp_path / "other"
    other.mkdir()
    (other / "traces.py").write_text(FILE)
    (other / "recipe.toml").write_text(RECIPE)
    with pytest.raises(UserError, match=r"defines a modality of the name that .* has taken"):
        load_recipe(other / "recipe.toml")
