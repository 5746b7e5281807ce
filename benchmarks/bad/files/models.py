"""Bad tokenizers and model directories, as motet train reads them."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bad.files.base import RECIPE, once, scratch, train
from bad.files.damage import PLACES, Change, Damage, cut, damaged, flip, nothing_left, overwrite, placed, text, zeros
from bad.run import Case

GONE = object()
"""In the place of a value: the key is taken out."""
_WRONG: dict[str, Any] = {
    "-1": -1,
    "0": 0,
    "10^30": 10**30,
    "1e30": 1e30,
    "a text": "hello",
    "a fraction": 1.5,
    "a list": [1],
    "a table": {},
    "true": True,
}


def model_cases(seed: int) -> Iterator[Case]:
    """Tokenizers, templates, configs and weights."""
    yield from _tokenizer_bytes()
    yield from _tokenizer_values()
    yield from _template_cases()
    yield from _config_cases()
    yield from _weight_cases(seed)
    yield from _index_cases()


def edit_json(path: Path, *keys: str | int, value: Any) -> None:
    """Another value at a place of a JSON file."""
    document = json.loads(path.read_text())
    at = document
    for key in keys[:-1]:
        at = at[key]
    if value is GONE:
        del at[keys[-1]]
    else:
        at[keys[-1]] = value
    path.write_text(json.dumps(document))


def _tokenizer_bytes() -> Iterator[Case]:
    for file in ("tokenizer.json", "tokenizer_config.json"):
        damages = {
            "empty": nothing_left,
            "zeros": zeros,
            "a web page": text,
            "cut to a half": cut(0.5),
            "cut by its last bracket": lambda data: data.rstrip()[:-1],
            "UTF-16": lambda data: data.decode().encode("utf-16"),
            "100,000 brackets": lambda _: b"[" * 100_000 + b"]" * 100_000,
            "a number of 5,000 digits": lambda data: b'{"version": ' + b"9" * 5000 + b"," + data.lstrip()[1:],
            "NaN": lambda data: b'{"bos_token": NaN,' + data.lstrip()[1:],
            "a list": lambda data: b"[" + data + b"]",
            "null": lambda _: b"null",
            "a lone surrogate": lambda data: data.replace(b"<eos>", b"<eos\\ud800>"),
        }
        for name, damage in damages.items():
            change = damaged(f"tokenizer/{file}", damage)
            yield train(f"tokenizer/{file} {name}", "refuse", change, says=file.replace(".", r"\."))
        for name, place in PLACES.items():
            # Without tokenizer_config.json, no token is named: `eos_token`, which ends answers, is missing.
            change = placed(f"tokenizer/{file}", place)
            yield train(f"tokenizer/{file} {name}", "refuse", change, says="tokenizer")
        bom = damaged(f"tokenizer/{file}", lambda data: b"\xef\xbb\xbf" + data)
        yield train(f"tokenizer/{file} with a byte order mark", "accept", bom)
    for name, place in PLACES.items():
        yield train(f"tokenizer/folder {name}", "refuse", placed("tokenizer", place), says="tokenizer")
    weights = "tokenizer/model.safetensors"
    yield train("tokenizer/other files beside it", "accept", lambda at: (at / weights).write_bytes(bytes(9)))


def _tokenizer_values() -> Iterator[Case]:
    tokenizer, config = "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"
    wrong: dict[str, tuple[str, tuple[str | int, ...], Any]] = {
        "no model": (tokenizer, ("model",), GONE),
        "a model that is null": (tokenizer, ("model",), None),
        "a model of an unknown type": (tokenizer, ("model", "type"), "Magic"),
        "no vocabulary": (tokenizer, ("model", "vocab"), GONE),
        "an empty vocabulary": (tokenizer, ("model", "vocab"), {}),
        "a vocabulary of texts": (tokenizer, ("model", "vocab"), {"a": "b"}),
        "a negative number of a token": (tokenizer, ("model", "vocab", "a"), -1),
        "a token of 2^40": (tokenizer, ("model", "vocab", "a"), 2**40),
        "a token of 4 billion": (tokenizer, ("model", "vocab", "a"), 2**32 - 1),
        "a pattern that does not close": (tokenizer, ("pre_tokenizer", "pattern"), {"Regex": "("}),
        "a step that is unknown": (tokenizer, ("pre_tokenizer",), {"type": "Magic"}),
        "added tokens that are a number": (tokenizer, ("added_tokens",), 7),
        "an added token without its text": (tokenizer, ("added_tokens", 0), {"id": 0}),
        "an end token that is not there": (config, ("eos_token",), "<end>"),
        "an end token that is a number": (config, ("eos_token",), 7),
        "an end token that is a list": (config, ("eos_token",), ["<eos>"]),
        "a template that is a number": (config, ("chat_template",), 7),
        "templates without names": (config, ("chat_template",), [{"template": "a"}]),
        "a token as another number": (config, ("added_tokens_decoder",), {"7": {"content": "<eos>"}}),
        "tokens that are a list": (config, ("added_tokens_decoder",), [1]),
        "a token without its text": (config, ("added_tokens_decoder",), {"7": {}}),
        "a token that tokenizer.json has not": (config, ("additional_special_tokens",), ["<more>"]),
    }
    for name, (file, keys, value) in wrong.items():
        change = _edit(file, *keys, value=value)
        # Too many tokens are found where the model is to have a row for each.
        yield train(f"tokenizer/{name}", "refuse", change, says="tokenizer|vocab")
    unnamed = _edit(config, "eos_token", value=GONE)
    yield train("tokenizer/no end token", "refuse", unnamed, says="eos_token")
    # What is allowed: the library takes it, and both words are learned as one.
    right: dict[str, tuple[str, tuple[str | int, ...], Any]] = {
        "two words of one number": (tokenizer, ("model", "vocab", "b"), 4),
        "an unknown token that is not there, and not needed": (tokenizer, ("model", "unk_token"), "<none>"),
        "a length of 10^30, as transformers writes": (config, ("model_max_length",), 10**30),
        "code beside it, which nobody runs": (config, ("auto_map",), {"AutoTokenizer": ["a.B", None]}),
    }
    for name, (file, keys, value) in right.items():
        yield train(f"tokenizer/{name}", "accept", _edit(file, *keys, value=value))


_TEMPLATE = "tokenizer/chat_template.jinja"
_TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


def _template_cases() -> Iterator[Case]:
    endless = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    refused = {
        "empty": "",
        "an open tag": "{% for m in messages %}",
        "an unknown tag": "{% magic %}",
        "an unknown filter": "{{ messages | magic }}",
        "an unknown function": "{{ magic() }}",
        "what leaves out the turns": "hello",
        "what raises": "{{ raise_exception('no') }}",
        "a division by zero": "{{ 1 / 0 }}",
        "a power": "{{ 10 ** 10 ** 10 }}",
        "a text of 10^12 characters": "{{ 'a' * 10 ** 12 }}",
        "a list of 10^12": "{{ [1] * 1000000000000 }}",
        "a sum that doubles": "{% set x = namespace(a='aa') %}{% for i in range(60) %}{% set x.a = x.a ~ x.a %}"
        "{% endfor %}" + _TURNS,
        "a sum that doubles by plus": "{% set x = namespace(a='aa') %}{% for i in range(60) %}{% set x.a = x.a + x.a %}"
        "{% endfor %}" + _TURNS,
        "a width of 10^10": "{{ '%10000000000d' % 1 }}",
        "a format of 10^10": "{{ '{:>10000000000}'.format('a') }}",
        "centre of 10^10": "{{ 'a' | center(10000000000) }}",
        "an indent of 10^10": "{{ 'a\nb' | indent(10000000000) }}",
        "a join of a join": "{{ ('a' * 4000) | list | join('a' * 4000000) }}",
        "ljust of 10^10": "{{ 'a'.ljust(10000000000) }}",
        "a replacement that grows": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "loops within loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "loops over texts": "{% set t = 'a' * 9999999 %}{% for i in t %}{% for j in t %}{% endfor %}{% endfor %}",
        "a batch without end": "{{ [1] | batch(1000000000, 'x') | list }}",
        "recursion": endless,
        "10,000 brackets": "{{ " + "(" * 10_000 + ")" * 10_000 + " }}",
        "its own class": "{{ messages.__class__.__mro__ }}",
        "what imports": "{% import 'os' as os %}{{ os.system('true') }}",
        "what includes": "{% include '/etc/passwd' %}",
        "today": "{{ strftime_now('%d') }}",
        "an answer that it rewrites": "{% for m in messages %}{{ m.content | upper | reverse }}{% endfor %}",
        "a lone surrogate": "{{ '\\ud800' }}" + _TURNS,
    }
    for name, source in refused.items():
        yield train(f"template/{name}", "refuse", _template(source), says="template|tokenizer")
    for name, place in PLACES.items():
        # A folder or a link to nothing by the name of a template is no template that was left out on purpose.
        verdict = "accept" if name == "gone" else "refuse"
        yield train(f"template/{name} in its place", verdict, _template(_TURNS, place))
    yield train("template/whole", "accept", _template(_TURNS))
    yield train("template/bytes that are not UTF-8", "refuse", lambda at: (at / _TEMPLATE).write_bytes(b"\xff"))
    both = {"default": _TURNS, "tool_use": "{{ magic() }}"}
    named = [{"name": name, "template": source} for name, source in both.items()]
    yield train("template/several", "accept", _edit("tokenizer/tokenizer_config.json", "chat_template", value=named))


def _template(source: str, place: Change | None = None) -> Change:
    def change(folder: Path) -> None:
        (folder / _TEMPLATE).write_text(source)
        if place is not None:
            place(folder / _TEMPLATE)

    return change


def _edit(name: str, *keys: str | int, value: Any) -> Change:
    return lambda folder: edit_json(folder / name, *keys, value=value)


@once
def _backbone() -> Path:
    """A model's directory, as transformers writes it, with its weights in one file."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = scratch() / "backbone"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False}
        model = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, max_position_embeddings=512))
    model.save_pretrained(path)
    return path


@once
def _sharded() -> Path:
    """The same with its weights in two files and an index."""
    from safetensors.torch import load_file, save_file

    path = scratch() / "sharded"
    shutil.copytree(_backbone(), path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    of_shard = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in of_shard.items():
        save_file({name: tensors[name] for name in held}, path / file, metadata={"format": "pt"})
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": {name: file for file, held in of_shard.items() for name in held},
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def _with_model(
    name: str,
    verdict: str,
    change: Change,
    says: str = "backbone",
    source: Callable[[], Path] = _backbone,
) -> Case:
    """The whole job with a backbone from a directory, changed: `change` is given the directory."""

    def prepare(folder: Path) -> None:
        start = RECIPE.index("[model.backbone.config]")
        end = RECIPE.index("[model.encoders.image]")
        recipe = RECIPE[:start] + 'path = "backbone"\n\n' + RECIPE[end:]
        (folder / "recipe.toml").write_text(recipe)
        shutil.copytree(source(), folder / "backbone")
        change(folder / "backbone")

    return train(f"model/{name}", verdict, prepare, "run.steps=1", says=says if verdict == "refuse" else "")


def _config_cases() -> Iterator[Case]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    for key in (*keys, "vocab_size", "max_position_embeddings", "rms_norm_eps"):
        for name, value in _WRONG.items():
            if key == "rms_norm_eps" and name == "a fraction":
                continue
            yield _with_model(f"{key} is {name}", "refuse", _edit("config.json", key, value=value))
    for key in ("hidden_size", "num_attention_heads"):
        yield _with_model(f"{key} is missing", "refuse", _edit("config.json", key, value=GONE))
    others: dict[str, tuple[str, Any]] = {
        "another width": ("hidden_size", 32),
        "another depth": ("num_hidden_layers", 2),
        "heads that do not divide": ("num_attention_heads", 3),
        "more heads of keys than of queries": ("num_key_value_heads", 4),
        "another vocabulary": ("vocab_size", 65),
        "10^9 layers": ("num_hidden_layers", 10**9),
        "another model": ("model_type", "llama"),
        "no model": ("model_type", GONE),
        "a model that is a number": ("model_type", 7),
        "an unknown activation": ("hidden_act", "magic"),
        "a rope of no base": ("rope_parameters", {"rope_type": "default", "rope_theta": 0}),
        "an unknown rope": ("rope_parameters", {"rope_type": "magic", "rope_theta": 1e4}),
        "rope that is a text": ("rope_parameters", "hello"),
        "a quantised model": ("quantization_config", {"quant_method": "gptq", "bits": 4}),
        "a dtype that is none": ("dtype", "magic"),
    }
    for name, (key, value) in others.items():
        yield _with_model(f"config of {name}", "refuse", _edit("config.json", key, value=value))
    damages: dict[str, Damage] = {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        "cut to a half": cut(0.5),
        "a list": lambda data: b"[" + data + b"]",
        "100,000 brackets": lambda _: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        "NaN": lambda data: data.replace(b'"hidden_size": 16', b'"hidden_size": NaN'),
        "a key twice": lambda data: data.replace(b'"hidden_size": 16', b'"hidden_size": 16, "hidden_size": 16'),
        "a number of 5,000 digits": lambda data: data.replace(b'"hidden_size": 16', b'"hidden_size": ' + b"9" * 5000),
    }
    for name, damage in damages.items():
        yield _with_model(f"config.json {name}", "refuse", damaged("config.json", damage), r"config\.json")
    for name, place in PLACES.items():
        yield _with_model(f"config.json {name} in its place", "refuse", placed("config.json", place), r"config\.json")
        yield _with_model(f"folder {name} in its place", "refuse", place)
    yield _with_model("whole", "accept", lambda _: None)
    yield _with_model("code beside it", "accept", lambda at: (at / "modeling.py").write_text("1 / 0\n"))


def header(length: int | None = None, **changes: Any) -> Damage:
    """A safetensors file whose header says something else. changes: of the first tensor's entry."""

    def damage(data: bytes) -> bytes:
        (size,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + size])
        first = next(entry for name, entry in entries.items() if name != "__metadata__")
        first.update(changes)
        made = json.dumps(entries).encode()
        return struct.pack("<Q", len(made) if length is None else length) + made + data[8 + size :]

    return damage


def _weight_cases(seed: int) -> Iterator[Case]:
    damages: dict[str, Damage] = {
        "empty": nothing_left,
        "zeros": zeros,
        "a web page": text,
        **{f"cut to {share:.0%}": cut(share) for share in (0.001, 0.01, 0.1, 0.5, 0.99)},
        "longer than it says": lambda data: data + bytes(64),
        "a header of 2^63 bytes": overwrite(0, struct.pack("<Q", 2**63)),
        "a header of 4 GB": overwrite(0, struct.pack("<Q", 2**32)),
        "a header of no bytes": overwrite(0, bytes(8)),
        "a header that is no JSON": overwrite(8, b"XXXX"),
        "a dtype that is none": header(dtype="F7"),
        "another dtype": header(dtype="I64"),
        "another shape": header(shape=[1, 2, 3]),
        "a negative shape": header(shape=[-16, -64]),
        "a shape of 10^30": header(shape=[10**15, 10**15]),
        "offsets past its end": header(data_offsets=[0, 10**12]),
        "offsets that run backwards": header(data_offsets=[64, 0]),
        "offsets that are texts": header(data_offsets=["0", "4"]),
        "a pickle": lambda _: b"\x80\x02cposix\nsystem\n(S'false'\ntR.",
    }
    for name, damage in damages.items():
        yield _with_model(f"weights {name}", "refuse", damaged("model.safetensors", damage))
    for name, place in PLACES.items():
        yield _with_model(f"weights {name} in their place", "refuse", placed("model.safetensors", place))
    # No checksum tells of it, and the weights are numbers still.
    tail = flip(seed, 2, start=4_000)
    yield _with_model("weights with flipped bits", "accept", damaged("model.safetensors", tail))
    for name, change in {"without the last": _drop_one, "with one more": _add_one}.items():
        yield _with_model(f"weights {name}", "refuse", change)
    for name, value in {"nan": float("nan"), "inf": float("inf")}.items():
        yield _with_model(
            f"weights that are {name}", "refuse", lambda at, value=value: _fill(at, value), "finite|nan|NaN"
        )
    pickle = "pytorch_model.bin"
    yield _with_model("weights as a pickle alone", "refuse", lambda at: (at / "model.safetensors").rename(at / pickle))


def _tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}


def _store(folder: Path, tensors: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_one(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors.pop("model.norm.weight")
    _store(folder, tensors)


def _add_one(folder: Path) -> None:
    tensors = _tensors(folder)
    tensors["model.layers.0.self_attn.sinks"] = tensors["model.norm.weight"].clone()
    _store(folder, tensors)


def _fill(folder: Path, value: float) -> None:
    tensors = _tensors(folder)
    tensors["model.norm.weight"][3] = value
    _store(folder, tensors)


def _index_cases() -> Iterator[Case]:
    name, first = "model.safetensors.index.json", "model-00001-of-00002.safetensors"
    one = "model.embed_tokens.weight"
    changes: dict[str, Change] = {
        "empty": damaged(name, nothing_left),
        "cut to a half": damaged(name, cut(0.5)),
        "a list": damaged(name, lambda _: b"[]"),
        "without its map": _edit(name, "weight_map", value=GONE),
        "with a map that is a list": _edit(name, "weight_map", value=[]),
        "with a map of numbers": _edit(name, "weight_map", one, value=7),
        "that names a file that is not there": _edit(name, "weight_map", one, value="model-00009-of-00002.safetensors"),
        "that climbs out of its folder": _edit(name, "weight_map", one, value="../media/2.png"),
        "that names a file elsewhere": _edit(name, "weight_map", one, value="/etc/passwd"),
        "that names a pickle": _edit(name, "weight_map", one, value="pytorch_model.bin"),
        "that names a weight in the wrong file": _edit(name, "weight_map", one, value=first[:9] + "2" + first[10:]),
        "without a weight": _edit(name, "weight_map", one, value=GONE),
        "whose first file is cut": damaged(first, cut(0.5)),
        "whose first file is missing": placed(first, PLACES["gone"]),
        "whose first file is a pipe": placed(first, PLACES["a pipe"]),
        "100,000 brackets": damaged(name, lambda _: b"[" * 100_000 + b"]" * 100_000),
    }
    # transformers loads all that is in the files that the index names, so that the weight is there.
    found = {"without a weight"}
    for what, change in changes.items():
        verdict = "accept" if what in found else "refuse"
        yield _with_model(f"index {what}", verdict, change, source=_sharded)
    yield _with_model("in two files", "accept", lambda _: None, source=_sharded)
