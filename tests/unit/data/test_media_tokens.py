"""Items stand in conversations as the model's own template and processor write them, with the model's marks."""

import json
from itertools import pairwise

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, models, normalizers, processors, trainers

from motet.core.errors import UserError
from motet.data.conversation import parse_conversation
from motet.data.text import ChatTokenizer
from unit.data.families import CHATML, GEMMA3, IM, LLAVA, QWEN2_AUDIO, QWEN2_VL, SMOLVLM, TOKENS, write_tokenizer
from unit.data.samples import a_record, train_backend


def conversation(*texts: str, **fields):
    turns = [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]
    return parse_conversation({"conversations": turns, **fields}, "here")


ASKED = conversation("What is <image> and <image>?", "A cat.", "<image>\nAnd here?", "A dog.")


def shown(tokenizer: ChatTokenizer, sequence) -> str:
    """All tokens as text, an item's own in brackets."""
    tokens = sequence.tokens.tolist()
    edges = [0, *(edge for at in sequence.media_positions.tolist() for edge in (at, at + 1)), len(tokens)]
    texts = [tokenizer.backend.decode(tokens[a:b], special=True) for a, b in pairwise(edges)]
    return "".join(f"[{text}]" if place % 2 else text for place, text in enumerate(texts))


def learned(tokenizer: ChatTokenizer, sequence) -> list[str]:
    edges = np.flatnonzero(np.diff(sequence.targets.astype(int), prepend=0, append=0)).reshape(-1, 2)
    return [tokenizer.decode(sequence.tokens[a:b], special=True) for a, b in edges]


def complaint(folder, asked=ASKED) -> str:
    with pytest.raises(UserError) as caught:
        ChatTokenizer.from_directory(folder).encode(asked)
    return str(caught.value)


IMAGE_PAD = {"image_token": "<|image_pad|>"}


@pytest.mark.parametrize(
    ("named", "files"),
    [
        ({"processor_class": "Qwen2VLProcessor"}, {}),
        ({}, {"preprocessor_config": {"processor_class": "Qwen2VLProcessor"}}),
        ({}, {"processor_config": IMAGE_PAD}),
        ({"extra_special_tokens": IMAGE_PAD}, {}),
        # As transformers' AutoProcessor takes it: the type of the model says which.
        ({}, {"preprocessor_config": {}, "config": {"model_type": "qwen2_vl", "vision_config": {}} | IMAGE_PAD}),
        # Its own image token would be <|IMAGE|>.
        ({"processor_class": "Qwen2_5OmniProcessor"}, {"config": {"image_token_id": 5, "vision_config": {}}}),
    ],
)
def test_qwen2_vl_has_its_vision_marks(tmp_path, named, files):
    named = named | {"eos_token": "<|im_end|>"}
    tokenizer = ChatTokenizer.from_directory(write_tokenizer(tmp_path, QWEN2_VL, TOKENS[QWEN2_VL], named, **files))
    sequence = tokenizer.encode(ASKED)
    assert shown(tokenizer, sequence) == (
        "<|im_start|>user\nWhat is <|vision_start|>[<|image_pad|>]<|vision_end|> and "
        "<|vision_start|>[<|image_pad|>]<|vision_end|>?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|>[<|image_pad|>]<|vision_end|>\nAnd here?<|im_end|>\n"
        "<|im_start|>assistant\nA dog.<|im_end|>\n"
    )
    assert sequence.media == ("image", "image", "image")
    assert learned(tokenizer, sequence) == ["A cat.<|im_end|>", "A dog.<|im_end|>"]
    prompt, answer = tokenizer.encode_prompt(ASKED)
    np.testing.assert_array_equal(prompt.tokens, sequence.tokens[: len(prompt.tokens)])
    np.testing.assert_array_equal(prompt.media_positions, sequence.media_positions)
    assert answer == "A dog."


def test_gemma_3_has_what_its_processor_adds(tmp_path):
    names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
    config = names | {"bos_token": "<bos>", "processor_class": "Gemma3Processor"}
    tokenizer = ChatTokenizer.from_directory(write_tokenizer(tmp_path / "a", GEMMA3, TOKENS[GEMMA3], config))
    asked = conversation(" What is <image>?", "A cat.", system="Be brief.")
    sequence = tokenizer.encode(asked)
    assert shown(tokenizer, sequence) == (
        "<bos><start_of_turn>user\nBe brief.\n\nWhat is\n\n<start_of_image>[<image_soft_token>]<end_of_image>\n\n?"
        "<end_of_turn>\n<start_of_turn>model\nA cat.<end_of_turn>\n"
    )
    assert learned(tokenizer, sequence) == ["A cat.<end_of_turn>"]
    unnamed = {"bos_token": "<bos>", "processor_class": "Gemma3Processor"}
    assert "does not name the tokens for an item of image" in complaint(
        write_tokenizer(tmp_path / "b", GEMMA3, TOKENS[GEMMA3], unnamed)
    )


def test_llava_takes_parts_alone_and_puts_images_first(tmp_path):
    config = {"eos_token": "</s>", "bos_token": "<s>", "processor_class": "LlavaProcessor"}
    tokenizer = ChatTokenizer.from_directory(write_tokenizer(tmp_path, LLAVA, TOKENS[LLAVA], config))
    sequence = tokenizer.encode(ASKED)
    assert shown(tokenizer, sequence) == (
        "USER: [<image>]\n[<image>]\nWhat is   and  ? ASSISTANT: A cat.</s>USER: [<image>]\nAnd here? "
        "ASSISTANT: A dog.</s>"
    )
    assert learned(tokenizer, sequence) == [" A cat.</s>", " A dog.</s>"]
    text = tokenizer.encode(conversation("Hi", "Ho"))
    assert shown(tokenizer, text) == "USER: Hi ASSISTANT: Ho</s>"


def test_qwen2_audio_and_images_of_another(tmp_path):
    tokens = [*TOKENS[QWEN2_AUDIO], "<image>"]
    tokenizer = ChatTokenizer.from_directory(
        write_tokenizer(tmp_path / "a", QWEN2_AUDIO, tokens, {"extra_special_tokens": {"audio_token": "<|AUDIO|>"}})
    )
    sequence = tokenizer.encode(conversation("<audio><image><audio>?", "A cat."))
    assert shown(tokenizer, sequence) == (
        "<|im_start|>user\nAudio 1: <|audio_bos|>[<|AUDIO|>]<|audio_eos|>\n[<image>]Audio 2: "
        "<|audio_bos|>[<|AUDIO|>]<|audio_eos|>\n?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    )
    assert sequence.media == ("audio", "image", "audio")
    # A model that hears and does not see has no way with images that could be missed: any token stands for one.
    heard = {"processor_class": "Qwen2AudioProcessor"}
    folder = write_tokenizer(tmp_path / "b", QWEN2_AUDIO, TOKENS[QWEN2_AUDIO], heard)
    tokenizer = ChatTokenizer.from_directory(folder)
    assert "user\nWhat is [<|endoftext|>] and [<|endoftext|>]?" in shown(tokenizer, tokenizer.encode(ASKED))


def test_what_is_not_understood_is_refused(tmp_path):
    plain = {"eos_token": "<|im_end|>"}
    qwen = write_tokenizer(tmp_path / "qwen", QWEN2_VL, TOKENS[QWEN2_VL], plain)
    assert complaint(qwen) == (
        "the tokenizer's chat template writes <|vision_start|> <|image_pad|> <|vision_end|> for one image, and which "
        "of them stands for it is not said; name it as 'image_token' in tokenizer_config.json"
    )
    # A text template in the directory of a model that sees: its marks would be missing, and nobody would know.
    for number, config in enumerate(({"image_token": "<|image_pad|>"}, {"processor_class": "Qwen2VLProcessor"})):
        folder = write_tokenizer(tmp_path / f"text{number}", CHATML, TOKENS[QWEN2_VL], plain | config)
        assert "is of a model with image tokens of its own" in complaint(folder)
        assert ChatTokenizer.from_directory(folder).encode(conversation("Hi", "Ho")).media == ()
    remote = {"vision_config": {}, "architectures": ["OwnChatModel"]}
    # Idefics 3 puts marks around its `<image>`, which a text template with the same word would leave out.
    idefics = {"processor_class": "Idefics3Processor", "image_token": "<image>"}
    folder = write_tokenizer(tmp_path / "idefics", CHATML, [*IM, "<image>"], idefics)
    assert "is of a model with image tokens of its own (<image>)" in complaint(folder)
    assert "(OwnChatModel)" in complaint(write_tokenizer(tmp_path / "remote", CHATML, IM, plain, config=remote))
    smol = write_tokenizer(tmp_path / "smol", SMOLVLM, TOKENS[SMOLVLM], {"processor_class": "Idefics9Processor"})
    assert "whose Idefics9Processor prepares texts in a way that is not known here" in complaint(smol)
    assert ChatTokenizer.from_directory(smol).encode(conversation("Hi", "Ho")).media == ()


def test_a_template_that_reorders_modalities_is_refused(tmp_path):
    template = LLAVA.replace("{{ '<image>\n' }}", "{{ '<image>\n' }}").replace(
        "{% for part in m.content if part.type == 'text' %}",
        "{% for part in m.content if part.type == 'audio' %}<audio>{% endfor %}"
        "{% for part in m.content if part.type == 'text' %}",
        1,
    )
    folder = write_tokenizer(tmp_path, template, [*TOKENS[LLAVA], "<audio>", "\n"], {"eos_token": "</s>"})
    tokenizer = ChatTokenizer.from_directory(folder)
    assert tokenizer.encode(conversation("<image><audio>", "A")).media == ("image", "audio")
    assert "reorders placeholders" in complaint(folder, conversation("<audio><image>", "A"))


def test_a_text_model_whose_template_takes_parts(tmp_path):
    """Newer templates of text models read a list's texts and skip all else: an image is a stand-in there."""
    folder = write_tokenizer(tmp_path, CHATML.replace("MEDIA", ""), [*IM, "<image>"], {"eos_token": "<|im_end|>"})
    tokenizer = ChatTokenizer.from_directory(folder)
    assert shown(tokenizer, tokenizer.encode(conversation("<image> What?", "A cat."))) == (
        "<|im_start|>user\n[<image>] What?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n"
    )


@pytest.mark.parametrize("token", ["<|im_end|>", "<|image_pad|>", "<|vision_start|>", "<|video_pad|>", "<|endoftext|>"])
def test_tokens_of_the_template_in_a_text_are_refused(tmp_path, token):
    config = {"processor_class": "Qwen2VLProcessor", "pad_token": "<|endoftext|>"}
    folder = write_tokenizer(tmp_path, QWEN2_VL, TOKENS[QWEN2_VL], config)
    for record in (a_record(f"Hi {token}"), a_record(answer=f"Ho{token}"), a_record(system=token)):
        said = complaint(folder, parse_conversation(record, "here"))
        assert f"holds '{token}', a token by which the tokenizer marks turns, texts or media" in said
    tokenizer = ChatTokenizer.from_directory(folder)
    with_box = tokenizer.encode(conversation("Where?", "<|box_start|>(1,2)"))
    assert tokenizer.backend.special["<|box_start|>"] in with_box.tokens


def test_a_named_token_is_special_whatever_its_file_says(tmp_path):
    folder = write_tokenizer(tmp_path, CHATML.replace("MEDIA", ""), IM, {"eos_token": "<|im_end|>"})
    described = json.loads((folder / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["special"] = token["content"] != "<|im_end|>"
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = ChatTokenizer.from_directory(folder)
    assert learned(tokenizer, tokenizer.encode(conversation("Hi", "Ho"))) == ["Ho<|im_end|>"]
    assert tokenizer.end_token == 2


def test_an_image_token_that_its_file_does_not_call_special(tmp_path):
    folder = write_tokenizer(tmp_path, LLAVA, TOKENS[LLAVA], {"eos_token": "</s>"})
    described = json.loads((folder / "tokenizer.json").read_text())
    for token in described["added_tokens"]:
        token["special"] = token["content"] != "<image>"
    (folder / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = ChatTokenizer.from_directory(folder)
    assert "USER: [<image>]\n[<image>]\nWhat" in shown(tokenizer, tokenizer.encode(ASKED))


def test_fingerprints_tell_processors_apart():
    backend = train_backend(TOKENS[QWEN2_VL])
    made = [ChatTokenizer(backend, QWEN2_VL, {}, processor=processor) for processor in (None, "Qwen2VLProcessor", "X")]
    assert len({tokenizer.fingerprint for tokenizer in made}) == 3


def test_a_line_break_beside_a_placeholder_is_the_templates_if_it_writes_one(tmp_path):
    config = {"eos_token": "</s>", "bos_token": "<s>", "processor_class": "LlavaProcessor"}
    tokenizer = ChatTokenizer.from_directory(write_tokenizer(tmp_path, LLAVA, TOKENS[LLAVA], config))
    for asked in ("<image>\nWhat?", "What?\n<image>", "<image>What?"):
        asked = conversation(asked, "A cat.", "\nSure?\n", "Yes.")
        assert shown(tokenizer, tokenizer.encode(asked)) == (
            "USER: [<image>]\nWhat? ASSISTANT: A cat.</s>USER: \nSure?\n ASSISTANT: Yes.</s>"
        )
        assert shown(tokenizer, tokenizer.encode_prompt(asked)[0]).startswith("USER: [<image>]\nWhat? ASS")


def test_a_line_break_before_a_placeholder_stays_where_items_stand_in_their_place(tmp_path):
    """As in InternVL and Qwen2-Audio, whose templates write one behind each item; behind the latter's mark."""
    intern = QWEN2_VL.replace("<|vision_start|><|image_pad|><|vision_end|>", "{{ '<image>\n' }}")
    named = {"start_image_token": "<img>", "context_image_token": "<image>", "end_image_token": "</img>"}
    named |= {"eos_token": "<|im_end|>", "processor_class": "InternVLProcessor"}
    special = ["<|im_start|>", "<|im_end|>", *(named[name] for name in named if "image" in name)]
    tokenizer = ChatTokenizer.from_directory(write_tokenizer(tmp_path / "a", intern, special, named))
    for asked, expected in (
        ("What?\n<image>", "What?\n<img>[<image>]</img>\n<|im_end|>"),
        ("<image>\nWhat?", "<img>[<image>]</img>\nWhat?<|im_end|>"),
        ("1: <image>\n2: <image>\n?", "1: <img>[<image>]</img>\n2: <img>[<image>]</img>\n?<|im_end|>"),
    ):
        assert expected in shown(tokenizer, tokenizer.encode(conversation(asked, "A cat.")))
    named = {"eos_token": "<|im_end|>", "processor_class": "Qwen2AudioProcessor"}
    folder = write_tokenizer(tmp_path / "b", QWEN2_AUDIO, TOKENS[QWEN2_AUDIO], named)
    tokenizer, heard = ChatTokenizer.from_directory(folder), "Audio 1: <|audio_bos|>[<|AUDIO|>]<|audio_eos|>\n"
    for asked, expected in (("<audio>\nWhat?", f"{heard}What?"), ("What?\n<audio>", f"What?\n{heard}<|im_end|>")):
        assert expected in shown(tokenizer, tokenizer.encode(conversation(asked, "A cat.")))


def test_nothing_ends_a_prompt(tmp_path):
    """What a tokenizer puts behind a text stands behind the answer, and not before it."""
    config = {"eos_token": "</s>", "bos_token": "<s>", "processor_class": "LlavaProcessor"}
    file = write_tokenizer(tmp_path, LLAVA, TOKENS[LLAVA], config) / "tokenizer.json"
    backend = Tokenizer.from_file(str(file))
    ends = [(token, backend.token_to_id(token)) for token in ("<s>", "</s>")]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    backend.save(str(file))
    tokenizer, asked = ChatTokenizer.from_directory(tmp_path), conversation("What?", "A cat.")
    assert shown(tokenizer, tokenizer.encode(asked)) == "<s>USER: What? ASSISTANT: A cat.</s></s>"
    assert shown(tokenizer, tokenizer.encode_prompt(asked)[0]) == "<s>USER: What? ASSISTANT: "


def their_tokenizer(template, **names):
    """transformers' tokenizer of a family."""
    transformers = pytest.importorskip("transformers")
    own = {
        name: token
        for name, token in names.items()
        if name not in ("bos_token", "eos_token", "pad_token", "add_bos_token")
    }
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(train_backend(TOKENS[template])),
        extra_special_tokens=own,
        chat_template=template,
        **{name: token for name, token in names.items() if name not in own},
    )


def messages_of(asked, breaks_line=False):
    """breaks_line: the template writes the line break that a record has beside a placeholder."""

    def part(kind, text):
        return {"type": kind, **({"text": text.removeprefix("\n" * breaks_line)} if kind == "text" else {})}

    return [{"role": turn.role, "content": [part(*piece) for piece in turn.pieces]} for turn in asked.turns]


def test_the_same_tokens_as_transformers_of_qwen2_vl(tmp_path):
    theirs = their_tokenizer(QWEN2_VL, eos_token="<|im_end|>", image_token="<|image_pad|>")
    theirs.save_pretrained(tmp_path)
    expected = theirs.apply_chat_template(messages_of(ASKED), return_dict=True)["input_ids"]
    assert ChatTokenizer.from_directory(tmp_path).encode(ASKED).tokens.tolist() == list(expected)
    assert ChatTokenizer.from_transformers(theirs).encode(ASKED).tokens.tolist() == list(expected)


@pytest.mark.parametrize("family", ["llava", "llava with a begin", "gemma3"])
def test_the_same_tokens_as_transformers_processors(tmp_path, family):
    transformers = pytest.importorskip("transformers")
    if family != "gemma3":
        begins = {"add_bos_token": True} if family != "llava" else {}
        theirs = their_tokenizer(LLAVA, bos_token="<s>", eos_token="</s>", image_token="<image>", **begins)
        images = transformers.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
        made = transformers.LlavaProcessor(
            images, theirs, chat_template=LLAVA, patch_size=14, vision_feature_select_strategy="full"
        )
    else:
        # The template writes <bos>, so the processor adds none.
        names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        names |= {"add_bos_token": True}
        theirs = their_tokenizer(GEMMA3, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", **names)
        images = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
        made = transformers.Gemma3Processor(images, theirs, chat_template=GEMMA3, image_seq_length=4)
    made.save_pretrained(tmp_path)
    messages = messages_of(ASKED, breaks_line=family != "gemma3")
    for part in (part for message in messages for part in message["content"] if part["type"] == "image"):
        part["image"] = Image.new("RGB", (56, 56))
    expected = np.array(made.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]).reshape(-1)
    # A tokenizer that pads by itself pads no conversation.
    described = json.loads((tmp_path / "tokenizer.json").read_text())
    padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    described["padding"] = padding | {"pad_type_id": 0, "pad_token": "<s>" if family != "gemma3" else "<pad>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    sequence = tokenizer.encode(ASKED)
    item = sequence.tokens[sequence.media_positions[0]]
    assert (expected == item).sum() == 3 * 4
    # Of the run of an item's tokens there is one here; LLaVA's runs of two images are parted by a line break.
    first = np.concatenate([[True], (expected[1:] != item) | (expected[:-1] != item)])
    np.testing.assert_array_equal(sequence.tokens, expected[first])
    prompt = tokenizer.encode_prompt(ASKED)[0].tokens[:-1]  # A space at its end belongs to the answer's first word.
    np.testing.assert_array_equal(prompt, sequence.tokens[: len(prompt)])


def test_a_class_that_splits_texts_in_its_own_way(tmp_path):
    transformers = pytest.importorskip("transformers")
    raw = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    # Llama 2's file puts a space behind each special token, and transformers' class does not.
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    raw.train_from_iterator(["[INST] what is it [/INST] a cat"] * 9, trainer)
    described = json.loads(raw.to_str())
    described["added_tokens"] = described["added_tokens"][:3]
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    template = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else m.content + eos_token }}"
        "{% endfor %}"
    )
    named = {"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>", "chat_template": template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    asked = conversation("what is it", "a cat", "it is", "a cat")
    messages = [{"role": turn.role, "content": turn.text} for turn in asked.turns]
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages)["input_ids"]
    tokenizer = ChatTokenizer.from_directory(tmp_path)
    sequence = tokenizer.encode(asked)
    assert sequence.tokens.tolist() == expected
    assert sequence.tokens.tolist() != raw.encode(shown(tokenizer, sequence), add_special_tokens=False).ids
    assert learned(tokenizer, sequence) == ["a cat</s>", "a cat</s>"]
