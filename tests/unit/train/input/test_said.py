"""What a run says of its examples before it begins, as it may be meant."""

import pytest

from motet.data.config import DataConfig
from motet.data.conversation import parse_conversation
from motet.data.dataset import Dataset
from motet.data.drawn import DrawnVocabulary
from motet.data.text import ChatTokenizer
from motet.train.input.datasets import say_named_twice, say_unlearned
from unit.data.samples import a_record, train_backend

ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"
LED = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}LEAD{% generation %}{{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


class Beginning(Dataset):
    def __init__(self, record):
        self.first = parse_conversation(record, "here")

    def conversation(self, example_id):
        return self.first


class OfData:
    def __init__(self, **options):
        self.data = DataConfig(tokenizer="none", **options)


def said(vocabulary, record):
    sentences = []
    say_unlearned(vocabulary, Beginning(record), sentences.append)
    return "".join(sentences)


def test_that_no_end_is_learned_is_said():
    backend = train_backend()
    endless, ending = (ChatTokenizer(backend, template, {"eos_token": "<eos>"}) for template in (ENDLESS, None))
    assert "so no end of it is learned" in said(endless, a_record())
    assert said(endless, {"text": "A document."}) == ""
    assert said(ending, a_record()) == said(DrawnVocabulary(8), a_record()) == ""


@pytest.mark.parametrize("lead", ["", "<think></think>"])
def test_what_stands_between_the_prompt_and_a_marked_answer_is_said_not_to_be_learned(lead):
    led = ChatTokenizer(train_backend(), LED.replace("LEAD", lead), {"eos_token": "<eos>"})
    sentence = said(led, a_record())
    assert (
        f"writes {lead!r} behind the prompt for an answer and before {{% generation %}}" in sentence if lead else True
    )
    assert bool(sentence) == bool(lead)


@pytest.mark.parametrize("begun", ["", "<think>\n"])
def test_a_prompt_that_begins_what_no_learned_answer_begins_with_is_said(begun):
    # As DeepSeek-R1's.
    template = LED.replace("LEAD", "").replace("{{ 'assistant: ' }}", f"{{{{ {f'assistant: {begun}'!r} }}}}")
    sentence = said(ChatTokenizer(train_backend(), template, {"eos_token": "<eos>"}), a_record())
    assert f"ends the prompt for an answer with {begun!r}" in sentence if begun else not sentence


def test_manifests_that_are_named_twice_are_said(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    a, b, link = (str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "link.jsonl"))
    for train, heldout, words in (
        ([a], [b], []),
        ([a, link], [], [f"data.train has {a} more than once"]),
        ([a], [a], [f"data.heldout has {a}, which is in data.train, too"]),
        ([a, b], [link, b], [f"data.heldout has {a} (and 1 other), which is in data.train, too"]),
        (["s3://x/a.jsonl"], ["s3://x/a.jsonl"], ["data.heldout has s3://x/a.jsonl, which is in data.train, too"]),
        (["{rank}.jsonl"], [a], []),
    ):
        sentences = []
        say_named_twice(OfData(train=train, heldout=heldout), sentences.append)
        assert len(sentences) == len(words)
        assert all(sentence.startswith(word) for sentence, word in zip(sentences, words, strict=True))
