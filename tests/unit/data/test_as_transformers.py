"""Tokens and targets are those of transformers: `apply_chat_template` of the same messages, and a plain text's own."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from motet.data.conversation import parse_conversation
from motet.data.text import ChatTokenizer
from unit.data.families import QWEN2_VL, TOKENS, write_tokenizer

GENERATING = QWEN2_VL.replace(
    "{{ part.text }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ part.text }}{% endgeneration %}"
    "{% else %}{{ part.text }}{% endif %}",
)
NAMED = {"processor_class": "Qwen2VLProcessor", "eos_token": "<|im_end|>"}


def both(folder, template):
    write_tokenizer(folder, template, TOKENS[QWEN2_VL], NAMED)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    theirs.chat_template = template
    return ChatTokenizer.from_directory(folder), theirs


def text(words):
    return {"type": "text", "text": words}


MESSAGES = [
    {"role": "system", "content": [text("Be "), text(" brief.")]},
    {
        "role": "user",
        "content": [text("What is "), {"type": "image"}, text("here,"), text(" and why?"), {"type": "image"}],
    },
    {"role": "assistant", "content": [text("A cat.")]},
    {"role": "user", "content": "And a dog?"},
    {"role": "assistant", "content": [text("The answer: "), text("one")]},
]


@pytest.mark.parametrize("template", [QWEN2_VL, GENERATING])
def test_messages_of_parts(tmp_path, template):
    ours, theirs = both(tmp_path, template)
    record = {"messages": MESSAGES, "images": ["a.png", "b.png"]}
    sequence = ours.encode(parse_conversation(record, "line 1"))
    expected = theirs.apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=template is GENERATING
    )
    # One token stands for an image there too, until a processor repeats it.
    assert sequence.tokens.tolist() == expected["input_ids"]
    pad = theirs.convert_tokens_to_ids("<|image_pad|>")
    assert np.flatnonzero(sequence.tokens == pad).tolist() == sequence.media_positions.tolist()
    if template is GENERATING:
        # And the end of a turn that stands behind what the template marks, as in that of LLaVA-OneVision.
        marked = np.array(expected["assistant_masks"], dtype=bool)
        ends = (sequence.tokens == theirs.eos_token_id) & np.append(False, marked[:-1])
        assert ends.sum() == 2
        assert sequence.targets.tolist() == (marked | ends).tolist()
        return
    # By difference: what an answer adds to the prompt for it, up to its end token.
    targets = np.zeros(len(sequence.tokens), dtype=bool)
    for turn in (2, 4):
        start = len(theirs.apply_chat_template(MESSAGES[:turn], add_generation_prompt=True)["input_ids"])
        end = len(theirs.apply_chat_template(MESSAGES[: turn + 1])["input_ids"])
        targets[start : end - len(theirs("\n")["input_ids"])] = True
    assert sequence.targets.tolist() == targets.tolist()


@pytest.mark.parametrize("adds", [False, True])
def test_a_plain_text_is_what_the_tokenizer_makes_of_it(tmp_path, adds):
    from tokenizers.processors import TemplateProcessing

    ours, theirs = both(tmp_path, QWEN2_VL)
    if adds:
        number = theirs.convert_tokens_to_ids("<|im_start|>")
        begin = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", number)])
        theirs.backend_tokenizer.post_processor = begin
        (tmp_path / "tokenizer.json").write_text(theirs.backend_tokenizer.to_str())
        ours = ChatTokenizer.from_directory(tmp_path)
    sequence = ours.encode(parse_conversation({"text": "What is here? A cat."}, "line 1"))
    expected = [*theirs("What is here? A cat.")["input_ids"], theirs.eos_token_id]
    assert sequence.tokens.tolist() == expected
    assert sequence.targets.tolist() == [False] + [True] * (len(expected) - 1)


def test_an_image_in_a_document_has_the_marks_of_the_model(tmp_path):
    ours, theirs = both(tmp_path, QWEN2_VL)
    record = {"texts": ["A cat", None, "and a dog."], "images": [None, "a.png", None]}
    sequence = ours.encode(parse_conversation(record, "line 1"))
    marked = "<|vision_start|><|image_pad|><|vision_end|>"
    assert sequence.tokens.tolist() == [*theirs(f"A cat{marked}and a dog.")["input_ids"], theirs.eos_token_id]
    marks = theirs(marked)["input_ids"]
    assert not sequence.targets[np.isin(sequence.tokens, marks)].any()
    assert sequence.targets.sum() == len(sequence.tokens) - len(marks) - 1
