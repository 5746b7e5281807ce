"""Reads the files of a tokenizer's directory: `tokenizer.json`, and the files that transformers writes beside it.

Chat template: the processor's (`chat_template.jinja`, `chat_template.json`, `processor_config.json`), else the
tokenizer's (`tokenizer_config.json`). Only the processor's may write media. Of several templates that of the name
"default" is taken, and by a text model that named "tool_use" for conversations with tools, as in transformers.

Named tokens: those of `tokenizer_config.json`, else of `processor_config.json` or `special_tokens_map.json`, else the
media tokens that `config.json` gives by number.

Some classes of transformers, such as LlamaTokenizer, take no more than vocabulary and merges from `tokenizer.json`, and
split texts in their own way; `add_bos_token` replaces what the file puts around a text. Where a directory names such a
class or option, or a model, of whose type transformers may take such a class whatever is named, transformers opens it;
and so where `tokenizer_config.json` has other flags of an added token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motet.core.errors import UserError
from motet.core.text_files import read_optional_object, read_text
from motet.data.media_tokens import TokenNames

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONFIG, _PROCESSORS = "tokenizer_config.json", ("processor_config.json", "preprocessor_config.json")
_NAMED = ("extra_special_tokens", "model_specific_special_tokens")
_AS_IN_FILE = (None, "PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers that take all of tokenizer.json as it is."""
_JINJA, TOOL_TEMPLATE = "chat_template.jinja", "tool_use"
"""The file of a chat template, and the name of one for conversations with tools."""
_AROUND = ("add_bos_token", "add_eos_token")
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
"""What says where a text is split at a token, and whether white space around it goes with it."""
_CLASS_OF_MODEL = ("model_type", "tokenizer_class")
"""Keys of config.json by which transformers takes a class."""
_NUMBERED = {
    "image_token": ("image_token_id", "image_token_index"),
    "audio_token": ("audio_token_id", "audio_token_index"),
}


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of a directory.

    backend:       the JSON of the tokenizers library, as transformers makes it of the directory.
    template:      Jinja source, or None.
    tool_template: that of conversations with tools, where they have one of their own.
    """

    backend: str
    template: str | None
    names: TokenNames
    tool_template: str | None = None


def read_tokenizer(directory: Path) -> TokenizerFiles:
    """The contents of a directory with tokenizer.json. Raises UserError naming the file that is wrong."""
    backend = read_text(directory / "tokenizer.json", "the tokenizer")
    tokenizer = open_backend(backend, f"{directory / 'tokenizer.json'}")
    config = read_optional_object(directory / _CONFIG)
    _check_same_tokens(directory, config, tokenizer)
    if config.get("split_special_tokens"):
        raise UserError(
            f"{directory / _CONFIG}: has 'split_special_tokens', by which transformers makes plain text of what marks "
            "turns and media; remove it"
        )
    special = _named_tokens(directory, config, tokenizer)
    model = read_optional_object(directory / "config.json")
    is_told = any(config.get(name) is not None for name in _AROUND) or any(name in model for name in _CLASS_OF_MODEL)
    if is_told or config.get("tokenizer_class") not in _AS_IN_FILE or _splits_otherwise(config, tokenizer):
        opened = open_by_transformers(directory)
        backend, special = opened.backend_tokenizer.to_str(), special_tokens(opened) | special
    names = TokenNames(special, _processor(directory, config))
    tool_template = read_tool_template(directory) if names.processor is None else None
    return TokenizerFiles(backend, read_template(directory), names, tool_template)


def open_by_transformers(directory: Path) -> Any:
    """The tokenizer of a directory as transformers opens it; no code of the directory is run. Raises UserError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    # The readers of transformers raise exceptions of any kind on a damaged file.
    except Exception as error:
        lacking = "" if os.path.lexists(directory / "tokenizer.json") else "; it must hold tokenizer.json"
        raise UserError(f"cannot be opened by transformers ({_line(error)}){lacking}") from None


def special_tokens(tokenizer: Any) -> dict[str, str]:
    """Name -> token of a tokenizer of transformers."""
    return {name: value for name, value in tokenizer.special_tokens_map.items() if isinstance(value, str)}


def open_backend(text: str, where: str) -> Tokenizer:
    """The tokenizer of a JSON text of the tokenizers library. where: the text's file, which a UserError names."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
    # The library raises plain Exception.
    except Exception as error:
        raise UserError(f"{where}: is no tokenizer of the tokenizers library ({_line(error)})") from None
    if not tokenizer.get_vocab_size():
        raise UserError(f"{where}: is a tokenizer without a single token")
    return tokenizer


def read_template(directory: Path) -> str | None:
    """The chat template of a directory, or None. Raises UserError if files differ, or for an empty one."""
    templates = list(_processor_templates(directory))
    for where, template in templates[1:]:
        if template != templates[0][1]:
            raise UserError(f"{templates[0][0]} and {where} hold different chat templates; remove one of them")
    if not templates and (template := _template_in(directory / _CONFIG)) is not None:
        templates = [(directory / _CONFIG, template)]
    if templates and not templates[0][1].strip():
        raise UserError(f"{templates[0][0]}: its chat template is empty; write one, or remove it for a plain one")
    return templates[0][1] if templates else None


def read_tool_template(directory: Path) -> str | None:
    """The template that the tokenizer of a directory has for conversations with tools, beside the default; or None."""
    jinja = directory / "additional_chat_templates" / f"{TOOL_TEMPLATE}.jinja"
    if os.path.lexists(jinja):
        return read_text(jinja, "the chat template")
    named = None if os.path.lexists(directory / _JINJA) else _templates_in(directory / _CONFIG)
    template = named.get(TOOL_TEMPLATE) if isinstance(named, dict) else None
    return template if isinstance(template, str) and template.strip() else None


def _processor_templates(directory: Path) -> Iterator[tuple[Path, str]]:
    jinja = directory / _JINJA
    if os.path.lexists(jinja):
        yield jinja, read_text(jinja, "the chat template")
    for path in (directory / "chat_template.json", directory / _PROCESSORS[0]):
        if (template := _template_in(path)) is not None:
            yield path, template


def _template_in(path: Path) -> str | None:
    """The template under `chat_template` in a JSON file: a text, or of several texts the one named "default"."""
    template = _templates_in(path)
    if isinstance(template, dict):
        if "default" not in template:
            raise UserError(f"{path}: 'chat_template' has several templates, of which none is named 'default'")
        template = template["default"]
    if template is not None and not isinstance(template, str):
        raise UserError(f"{path}: 'chat_template' must be a text, or several, of which one is named 'default'")
    return template


def _templates_in(path: Path) -> Any:
    """What a JSON file has under `chat_template`, several by their names."""
    template = read_optional_object(path).get("chat_template")
    if not isinstance(template, list):
        return template
    return {
        named["name"]: named["template"]
        for named in template
        if isinstance(named, dict) and isinstance(named.get("name"), str) and "template" in named
    }


def _named_tokens(directory: Path, config: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Name -> token. Raises UserError for a token that the tokenizer does not have: it would become text."""
    files = [(name, read_optional_object(directory / name)) for name in ("special_tokens_map.json", _PROCESSORS[0])]
    files += [(_CONFIG, config), *((_CONFIG, config[name]) for name in _NAMED if isinstance(config.get(name), dict))]
    special = _numbered_tokens(directory, tokenizer)
    for file, name, value in ((file, *entry) for file, table in files for entry in table.items()):
        content = value.get("content") if isinstance(value, dict) else value
        if not name.endswith("_token") or content is None or isinstance(content, bool):
            continue
        if not isinstance(content, str) or tokenizer.token_to_id(content) is None:
            raise UserError(
                f"{directory / file}: '{name}' is {str(content)[:40]!r}, which tokenizer.json does not hold; save "
                "the tokenizer anew by transformers"
            )
        special[name] = content
    return special


def _numbered_tokens(directory: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Name -> media token by its number in config.json. A number of an ordinary word is of another tokenizer."""
    config, added = read_optional_object(directory / "config.json"), tokenizer.get_added_tokens_decoder()
    numbers = {
        name: next((config[key] for key in keys if isinstance(config.get(key), int)), None)
        for name, keys in _NUMBERED.items()
    }
    return {name: added[number].content for name, number in numbers.items() if number in added}


def _processor(directory: Path, config: dict[str, Any]) -> str | None:
    """The class that prepares the model's inputs; for a multimodal model without one, the model's own class."""
    for table in (*(read_optional_object(directory / name) for name in _PROCESSORS), config):
        if isinstance(table.get("processor_class"), str):
            return str(table["processor_class"])
    model = read_optional_object(directory / "config.json")
    if any(name in model for name in ("vision_config", "audio_config", *_NUMBERED["image_token"])):
        if any(os.path.lexists(directory / name) for name in _PROCESSORS) and (named := _of_type(model)):
            return named
        classes = model.get("architectures")
        return str(classes[0]) if isinstance(classes, list) and classes else str(model.get("model_type"))
    return None


def _of_type(model: dict[str, Any]) -> str | None:
    """The processor that transformers' AutoProcessor takes for a model whose files name none."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    return PROCESSOR_MAPPING_NAMES.get(str(model.get("model_type")))


def _check_same_tokens(directory: Path, config: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Raise UserError if another file has a token that tokenizer.json lacks: transformers would add it."""
    for file, token, number in _tokens_elsewhere(directory, config):
        content = token.get("content") if isinstance(token, dict) else token
        known = tokenizer.token_to_id(content) if isinstance(content, str) else None
        if known is None or number not in (None, str(known)):
            as_number = f" as token {number}" if number else ""
            raise UserError(
                f"{file}: has {str(content)[:40]!r}{as_number}, which tokenizer.json has not; save the tokenizer anew "
                "by transformers"
            )


def _splits_otherwise(config: dict[str, Any], tokenizer: Tokenizer) -> bool:
    """Whether tokenizer_config.json has other flags of a token than tokenizer.json: transformers takes its flags."""
    added = {str(number): token for number, token in tokenizer.get_added_tokens_decoder().items()}
    return any(
        said.get(flag, getattr(added[number], flag)) != getattr(added[number], flag)
        for number, said in (config.get("added_tokens_decoder") or {}).items()
        for flag in _FLAGS
        if number in added and isinstance(said, dict)
    )


def _tokens_elsewhere(directory: Path, config: dict[str, Any]) -> Iterator[tuple[Path, object, str | None]]:
    """(file, token, number or None) of the tokens in files other than tokenizer.json."""
    where, older = directory / _CONFIG, directory / "added_tokens.json"
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict):
        raise UserError(f"{where}: 'added_tokens_decoder' must be an object of tokens by their number")
    for number, token in added.items():
        yield where, token, number
    for token, number in read_optional_object(older).items():
        yield older, token, str(number)
    for name in ("additional_special_tokens", *_NAMED):
        tokens = config.get(name)
        for token in tokens if isinstance(tokens, list) else ():
            yield where, token, None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
