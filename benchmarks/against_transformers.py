"""Loss and every gradient of whole models beside those of transformers, from the same files, in float64.

    python benchmarks/against_transformers.py [--json FILE] [FAMILY ...]
    python benchmarks/against_transformers.py --parts [--json FILE] [FAMILY ...]

The second is of encoders, backbones and projectors by parts (`parts.py`). The first is of whole models. transformers'
side there: its own class, processor and chat template; one example at a time, without padding or packing; the loss on
what its template marks as the assistant's. Motet's side: the recipe of six keys, all examples packed into one sequence,
and again one at a time. Norms of both keep float64, and so do routers of experts, weights of attention with soft caps,
and what turns patches with their places: transformers' round to float32, which is 1e-7 by itself. Logits of a Granite
are divided as its own class does, which LLaVA-NeXT of transformers leaves out.

A row a family is printed, as docs/models.md has it, and stored as a row a figure. What is more than 1e-9 is missed.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import soundfile
import torch
import transformers
from loss_and_gradients import Step
from parts import PARTS, distances
from PIL import Image
from rows import Row, finish, options, table_line
from their_videos import TheirVideo, their_video
from torch.nn.functional import cross_entropy
from transformers.image_transforms import convert_to_rgb
from whole_models import FAMILIES, GENERIC, open_processor, sound_of, write_job

from motet.data.transforms import load_media
from motet.dispatch.batch import pack, stacked_media
from motet.models.build import build_mllm
from motet.models.exact import keep_float64
from motet.models.materialise import materialise
from motet.models.mllm import MLLM
from motet.models.whole.export import names_of
from motet.on_device import on_device
from motet.train.checkpoint.restoring import load_weights
from motet.train.input.datasets import open_dataset
from motet.train.recipe.recipe_file import load_recipe
from motet.train.recipe.whole import WholeRecipe
from unit.models.wide import InFloat64  # parts.py lets tests be imported.

CPU = torch.device("cpu")

_MOST = dict.fromkeys(("loss", "gradients", "packed against one at a time"), 1e-9)
"""Columns of both tables, and the most that a figure of each may be."""


def theirs(folder: Path, adapter: Path | None = None) -> Step:
    """transformers' step on a job of `whole_models.write_job`. adapter: a directory that peft puts on top, to learn."""
    model = their_model(folder, adapter)
    total, num_targets = torch.zeros((), dtype=torch.float64), 0
    # Granite's own class divides its logits by it, and transformers' LLaVA-NeXT around a Granite does not.
    scaling = getattr(model.config.get_text_config(), "logits_scaling", 1.0)
    for inputs, is_target in their_inputs(folder):
        logits = model(**inputs).logits[0] / scaling
        labels = inputs["input_ids"][0, 1:][is_target[1:]]
        total = total + cross_entropy(logits[:-1][is_target[1:]], labels, reduction="sum")
        num_targets += len(labels)
    (total / num_targets).backward()
    gradients = {_plain(name): each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Step(total.item() / num_targets, num_targets, gradients)


def their_model(folder: Path, adapter: Path | None = None) -> Any:
    """transformers' model of a job in float64, as it learns. adapter: as of `theirs`."""
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    kind = class_of(config)
    config = getattr(config, "thinker_config", config)
    model = kind.from_pretrained(folder / "model", dtype=torch.float64).train()
    with torch.device("meta"):
        # What the class freezes (positions of clips) its reader of files lets learn, as it does all weights.
        learns = {name: each.requires_grad for name, each in kind(config).named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learns[name])
    keep_float64(model)
    if adapter is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    _turn_patches_in_float64(model)
    _route_in_float64(model)
    _weigh_in_float64(model)
    return model


def their_inputs(folder: Path) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
    """What transformers' model is given of each example of a job, and which tokens are targets, bool [length]."""
    processor = open_processor(folder / "model")
    kind = transformers.AutoConfig.from_pretrained(folder / "model").model_type
    for line in (folder / "train.jsonl").read_text().splitlines():
        record = json.loads(line)
        # Not by the parts' paths: the reader of these shows what is under transparent pixels, the processor white.
        images = [Image.open(folder / name) for name in record.get("image", [])]
        if kind in GENERIC:
            images = [convert_to_rgb(image) for image in images]  # Some of these processors take nothing else.
        inputs = inputs_of(processor, record, images, folder)
        if "video" in record and reads_sound(folder):
            inputs["use_audio_in_video"] = True
        is_target = torch.as_tensor(inputs.pop("assistant_masks")).bool()[0]
        # Positions of frames are rounded as their seconds are, in float32.
        inputs = {
            name: each.double()
            if torch.is_tensor(each) and each.is_floating_point() and name != "second_per_grid_ts"
            else each
            for name, each in inputs.items()
        }
        yield inputs, is_target


def reads_sound(folder: Path) -> bool:
    """Whether the recipe of a job reads the sound of videos with their frames."""
    return "sound = true" in (folder / "recipe.toml").read_text()


def class_of(config: Any) -> Any:
    """transformers' class of a directory; of Qwen2.5-Omni that of its thinker, which reads texts and media."""
    name = config.architectures[0]
    return getattr(transformers, "Qwen2_5OmniThinkerForConditionalGeneration" if "Omni" in name else name)


def _plain(name: str) -> str:
    """The name of a weight without what peft adds to it."""
    return name.removeprefix("base_model.model.").replace("modules_to_save.", "").replace(".default", "")


def inputs_of(processor: Any, record: dict[str, Any], images: list[Image.Image], folder: Path) -> dict[str, Any]:
    """What a processor makes of a record and its media, with `assistant_masks`. folder: where clips lie."""
    if processor.chat_template is None:  # PaliGemma: a question and an answer.
        question, answer = (turn["value"] for turn in record["conversations"])
        text = question.replace("<image>\n", "<image>")
        inputs = processor(images=images, text=text, suffix=answer, return_tensors="pt")
        return {**inputs, "assistant_masks": inputs["labels"] != -100}
    messages = messages_of(record, placeholder_of(processor))
    clips = [part for message in messages for part in message["content"] if part["type"] == "audio"]
    for part, name in zip(clips, record.get("audio", []), strict=True):
        part["audio"] = soundfile.read(folder / name, dtype="float32")[0]
    if "video" in record and isinstance(processor, transformers.SmolVLMProcessor):
        return _inputs_of_frames(processor, messages, record, images, folder)
    if "video" in record:  # They come behind it, in `_with_videos`.
        processor.validate_inputs = lambda **inputs: None
        if isinstance(processor, transformers.Qwen2_5OmniProcessor):  # It would read those that are named.
            read = type(processor)._multimodal_inputs_from_conversations
            processor._multimodal_inputs_from_conversations = lambda turns, *more, **options: read(
                processor, [_without_videos(each) for each in turns], *more, **options
            )
    inputs = processor.apply_chat_template(
        messages,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        return_assistant_tokens_mask=True,
        processor_kwargs={"images": images, **_crops_of(processor)} if images else {},
    )
    if "video" in record and reads_sound(folder):
        _hear_videos(inputs, processor, record, folder)
    if "input_features" in inputs:
        _take_features(inputs, record, folder)
    return _with_videos(dict(inputs), processor, record, folder) if "video" in record else dict(inputs)


def _crops_of(processor: Any) -> dict[str, Any]:
    """What asks a processor for the crops that its image processor's file names: Gemma 3's makes none else."""
    own = vars(getattr(processor, "image_processor", processor))
    return {name: each for name, each in own.items() if "pan_and_scan" in name and own["do_pan_and_scan"]}


def _turn_patches_in_float64(model: torch.nn.Module) -> None:
    """Let towers of Qwen turn patches in float64, in place: transformers' turn them in float32, which is 1e-7."""
    for module in list(model.modules()):
        if hasattr(modeling := sys.modules[type(module).__module__], "apply_rotary_pos_emb_vision"):
            vars(modeling)["apply_rotary_pos_emb_vision"] = _turned_in_float64
        if type(module).__name__.endswith("VisionRotaryEmbedding"):
            module.forward = partial(_turns_in_float64, module)


def _route_in_float64(model: torch.nn.Module) -> None:
    """Let routers of experts keep float64, in place, and experts be computed by what knows it."""
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = partial(_routed_in_float64, module)
        if getattr(getattr(module, "config", None), "_experts_implementation", None):
            module.config._experts_implementation = "eager"


def _weigh_in_float64(model: torch.nn.Module) -> None:
    """Let attention that transformers computes by itself keep its weights in float64, in place: soft caps (Gemma 2)."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if type(module).__name__.endswith("Attention") and getattr(config, "_attn_implementation", "") == "eager":
            module.forward = partial(_weighed_in_float64, module.forward)


def _weighed_in_float64(forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    with InFloat64():
        return forward(*inputs, **options)


def _routed_in_float64(router: Any, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = torch.nn.functional.linear(rows.reshape(-1, router.hidden_dim), router.weight)
    weights, chosen = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def _turns_in_float64(rotary: Any, values: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    angles = positions[..., None].double() * rotary.inv_freq.double()
    return tuple(rotary.recomposition_frequencies(turns) for turns in (angles.cos(), angles.sin()))


def _turned_in_float64(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, cos, sin = tensors
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)

    def turned(rows: torch.Tensor) -> torch.Tensor:
        first, second = rows.chunk(2, dim=-1)
        return rows * cos + torch.cat([-second, first], dim=-1) * sin

    return turned(query), turned(key)


def _take_features(inputs: dict[str, Any], record: dict[str, Any], folder: Path) -> None:
    """Put Motet's frames of clips in the place of transformers', which must be equal to 1e-5: both are float32.

    Frames behind those that Motet computes stay as they are, as nothing may depend on them.
    """
    recipe = load_recipe(folder / "recipe.toml", [])
    heard = {name: sound_of(folder / name) for name in record.get("video", []) if reads_sound(folder)}
    clips = {name: soundfile.read(folder / name, dtype="float32")[0] for name in record.get("audio", [])}
    sounds = heard | clips
    for name, theirs, mask in zip(sounds, inputs["input_features"], inputs["feature_attention_mask"], strict=True):
        transform: Any = recipe.transform("audio")
        media = transform(sounds[name], 16_000)
        if (
            int(mask.sum()) != media.size[0]
            or np.abs(theirs[:, : len(media.values)].numpy().T - media.values).max() > 1e-5
        ):
            raise ValueError(f"{name} has other frames")
        theirs[:, : len(media.values)] = torch.from_numpy(media.values.T)


def _hear_videos(inputs: dict[str, Any], processor: Any, record: dict[str, Any], folder: Path) -> None:
    """Put the frames of videos' sound before those of clips, which stand behind all videos."""
    sounds = [sound_of(folder / name) for name in record["video"]]
    made, _ = processor._process_audio(sounds, sampling_rate=16_000, return_attention_mask=True, return_tensors="pt")
    for name in ("input_features", "feature_attention_mask"):
        inputs[name] = torch.cat([made[name], *([inputs[name]] if name in inputs else [])])


def _without_videos(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    kept = [[part for part in message["content"] if part["type"] != "video"] for message in messages]
    return [message | {"content": content} for message, content in zip(messages, kept, strict=True)]


def _with_videos(inputs: dict[str, Any], processor: Any, record: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The inputs with what transformers' video processor makes of the record's videos, each of which has one token."""
    # Qwen2.5-Omni's processor has a size of its own, whatever the files say.
    own = {name: each for name, each in getattr(processor, "videos_kwargs", {}).items() if name == "size"}
    made = [their_video(folder / "model", folder / name, **own) for name in record["video"]]
    values = torch.cat([each.values for each in made])
    is_video = torch.as_tensor(inputs["input_ids"])[0] == processor.video_token_id
    num_heard = len(made) if reads_sound(folder) else 0
    rows = _rows_of_sound(inputs["feature_attention_mask"][:num_heard]) if num_heard else [None] * len(made)
    texts = [_video_text(processor, each, sound) for each, sound in zip(made, rows, strict=True)]
    for name in inputs.keys() & {"assistant_masks", "mm_token_type_ids", "attention_mask", "input_ids"}:
        parts = list(torch.as_tensor(inputs[name])[0][:, None])
        for place, text in zip(is_video.nonzero()[:, 0].tolist(), texts, strict=True):
            in_place = {"input_ids": text, "mm_token_type_ids": 2 * (text == processor.video_token_id)}
            parts[place] = in_place.get(name, parts[place].expand(len(text)))
        inputs[name] = torch.cat(parts)[None]
    inputs["pixel_values_videos"] = values
    if grids := [each.grid for each in made if each.grid is not None]:
        inputs["video_grid_thw"] = torch.cat(grids)
    if isinstance(processor, transformers.Qwen2_5OmniProcessor):
        return inputs | {"video_second_per_grid": torch.ones(len(made))}  # It takes two frames a second for granted.
    if "second_per_grid_ts" not in processor.model_input_names:
        return inputs
    # As Qwen2_5_VLProcessor has it.
    return inputs | {"second_per_grid_ts": torch.tensor([2 / each.metadata.sampled_fps for each in made])}


def _inputs_of_frames(
    processor: Any, messages: list[dict[str, Any]], record: dict[str, Any], images: list[Image.Image], folder: Path
) -> dict[str, Any]:
    """The same of a record with videos whose frames stand as images (SmolVLM), by the processor's own way through."""
    made = [their_video(folder / "model", folder / name) for name in record["video"]]
    frames = torch.cat([each.values for each in made])
    given = {"pixel_values": frames, "video_metadata": [each.metadata for each in made]}
    processor.video_processor = _VideosAsMade(given)
    for part in (part for message in messages for part in message["content"] if part["type"] == "video"):
        part["video"] = np.zeros((1, 2, 2, 3), dtype=np.uint8)
    asked = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = transformers.SmolVLMProcessor.apply_chat_template(
        processor, messages, **asked, processor_kwargs={"images": images} if images else {}
    )
    kept = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    # Where there are images, too, the processor drops their pixels.
    pixels = [processor.image_processor([images], return_tensors="pt")["pixel_values"]] if images else []
    kept["pixel_values"] = torch.cat([*pixels, frames.flatten(0, 1)[None]], dim=1)
    # Its template of videos marks no answers: what stands behind the prompt for one, and the token that ends it.
    tokens, marks = inputs["input_ids"][0].tolist(), processor.tokenizer("Assistant:", add_special_tokens=False)
    is_target, role = torch.zeros(1, len(tokens), dtype=torch.bool), marks["input_ids"]
    for place in range(len(tokens)):
        if tokens[place : place + len(role)] == role:
            start = place + len(role)
            is_target[0, start : tokens.index(processor.tokenizer.eos_token_id, start) + 1] = True
    return kept | {"assistant_masks": is_target}


class _VideosAsMade:
    """A video processor that returns what has been made. Frames are asked of it, as its class asks for them."""

    num_frames, fps = 3, 20

    def __init__(self, made: dict[str, Any]) -> None:
        self.made = made

    def __call__(self, videos: Any, **options: Any) -> dict[str, Any]:
        return dict(self.made)


def _rows_of_sound(mask: torch.Tensor) -> list[int]:
    """Rows of each sound, as transformers' processor counts them."""
    from transformers.models.qwen2_5_omni import processing_qwen2_5_omni as processing

    return processing._get_feat_extract_output_lengths(mask.sum(-1)).tolist()


def _video_text(processor: Any, video: TheirVideo, sound: int | None) -> torch.Tensor:
    """The tokens of a video, as transformers' processor writes them. sound: the rows of its sound; None: not read."""
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    made = {"video_grid_thw": video.grid, "video_metadata": [video.metadata], "pixel_values_videos": video.values}
    heard: dict[str, Any] = {"load_audio_from_video": sound is not None}
    if sound is not None:
        made["video_second_per_grid"] = [1.0]
        for mark in ("audio_bos_token", "audio_eos_token"):
            setattr(processor, mark, getattr(processor.tokenizer, mark))
        heard |= {"processed_audio": {"num_audio_tokens": [sound]}, "video_to_audio_indices": [0]}
        heard |= {name: getattr(processor, name) for name in ("seconds_per_chunk", "position_id_per_seconds")}
    text = processor.replace_video_token(made, 0, **heard)
    return torch.tensor(processor.tokenizer(text, add_special_tokens=False)["input_ids"])


def messages_of(record: dict[str, Any], placeholder: str = "<image>") -> list[dict[str, Any]]:
    """A record's turns as typed parts: texts, and items where the placeholder stands."""
    messages = []
    for turn in record["conversations"]:
        video = placeholder.replace("image", "video")
        pieces = re.split(f"({placeholder}|{video}|<audio>)", turn["value"])
        parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
        for mark, text in zip(pieces[1::2], pieces[2::2], strict=True):
            parts += [{"type": mark.strip("<>\n")}, {"type": "text", "text": text}]
        role = {"human": "user", "gpt": "assistant"}[turn["from"]]
        messages.append({"role": role, "content": [part for part in parts if part.get("text", True)]})
    return messages


def placeholder_of(processor: Any) -> str:
    """What stands for an item in a record; with its line break, if the template writes one behind it."""
    kind = "image" if hasattr(processor, "image_processor") else "audio"
    alone = [{"role": "user", "content": [{"type": kind}, {"type": "text", "text": "?"}]}]
    token = re.escape(getattr(processor, f"{kind}_token"))
    breaks_line = re.search(f"{token}(<[^<>]*>)*\n", processor.apply_chat_template(alone))  # Marks may follow it.
    return f"<{kind}>\n" if breaks_line else f"<{kind}>"


def ours(
    folder: Path,
    *,
    packed: bool = True,
    overrides: Sequence[str] = (),
    checkpoint: Path | None = None,
    device: torch.device = CPU,
) -> Step:
    """Motet's step on the same job. packed: all examples in one pack; else one at a time. overrides: of the recipe.

    checkpoint: whose weights it has; by default those of the directory. device: where it computes.
    """
    recipe = load_recipe(folder / "recipe.toml", ["run.dtype=float64", *overrides])
    assert isinstance(recipe, WholeRecipe)
    vocabulary = recipe.vocabulary()
    model = build_mllm(recipe.modules, vocabulary.vocabulary_size, torch.float64, deferred=True)
    materialise(model, recipe.modules, 0, CPU)
    if checkpoint is not None:
        load_weights(checkpoint, model, None)
    model.to(device)
    dataset = open_dataset(recipe, recipe.data.train, vocabulary, model, lambda sentence: None)
    numbers = range(dataset.num_examples)
    batches = [numbers] if packed else [[number] for number in numbers]
    total, num_targets = torch.zeros((), dtype=torch.float64, device=device), 0
    for batch in batches:
        loss, count = _loss_of(model, dataset, batch, device)
        total, num_targets = total + loss, num_targets + count
    (total / num_targets).backward()
    names = names_of(recipe.directory, model)
    gradients = {names[name]: each.grad.cpu() for name, each in model.named_parameters() if each.grad is not None}
    return Step(total.item() / num_targets, num_targets, gradients)


def _loss_of(model: MLLM, dataset: Any, numbers: Sequence[int], device: torch.device = CPU) -> tuple[torch.Tensor, int]:
    sequences = [dataset.tokens(number) for number in numbers]
    items: dict[str, list[Any]] = {name: [] for name in model.encoders}
    for ref in (ref for number in numbers for ref in dataset.media_refs(number)):
        for phase in dataset.readers_of(ref):
            items[phase].append(load_media(ref, dataset.transforms[phase]))
    sizes = {phase: np.stack([item.size for item in each]) for phase, each in items.items() if each}
    rows = {phase: model.encoders[phase].num_tokens(each) for phase, each in sizes.items()}
    media = {phase: stacked_media(each) for phase, each in items.items() if each}
    media = {phase: (values.double(), sizes) for phase, (values, sizes) in media.items()}
    packed = pack(sequences, rows)
    if packed.offsets.diff().tolist() != dataset.batch_lengths(np.array(numbers), 1).sequence.tolist():
        raise ValueError("sequences are not as long as the index says")
    media = {phase: (on_device(values, device), sizes) for phase, (values, sizes) in media.items()}
    return model(packed.with_tensors(partial(on_device, device=device)), media)


def main() -> None:
    """Print and store a row a family."""
    parser = options(__doc__.partition("\n\n")[0], reads_lengths=False, draws=False)
    parser.add_argument(
        "--parts", action="store_true", help="encoders, backbones and projectors by parts, in place of whole models"
    )
    parser.add_argument(
        "families",
        nargs="*",
        help=f"whole models: {', '.join(FAMILIES | GENERIC)}; parts: {', '.join(PARTS)}; by default all",
    )
    arguments = parser.parse_args()
    known = PARTS if arguments.parts else list(FAMILIES | GENERIC)
    if unknown := [family for family in arguments.families if family not in known]:
        parser.error(f"{unknown[0]} is none of {', '.join(known)}")
    transformers.logging.set_verbosity_error()
    measure = _of_part if arguments.parts else _of_whole
    rows: list[Row] = []
    for family in arguments.families or known:
        with tempfile.TemporaryDirectory() as folder:
            figures = measure(Path(folder), family)
        if not rows:
            print(f"| {'`family`' if arguments.parts else '`model_type`'} | {' | '.join(figures)} |")
            print("|---" * (1 + len(figures)) + "|")
        print(table_line(family, figures), flush=True)
        rows += [Row(f"{family}: {column}", value, _MOST.get(column)) for column, value in figures.items()]
    finish(rows, arguments.json)


def _of_part(folder: Path, family: str) -> dict[str, float]:
    of = distances(folder, family)
    rounded = {"as transformers rounds": max(of.rounded)}
    return {"targets": of.num_targets, **dict(zip(_MOST, (*of.exact, max(of.parted)), strict=True)), **rounded}


def _of_whole(folder: Path, family: str) -> dict[str, float]:
    write_job(folder, family)
    reference, packed, alone = theirs(folder), ours(folder), ours(folder, packed=False)
    exact, parted = packed.distance(reference), max(packed.distance(alone))
    return {"targets": packed.num_targets, **dict(zip(_MOST, (*exact, parted), strict=True))}


if __name__ == "__main__":
    main()
