"""A run whose chat template lets no end of an answer be learned says so, if it has conversations."""

from motet.data.conversation import parse_conversation
from motet.data.dataset import Dataset
from motet.data.drawn import DrawnVocabulary
from motet.data.text import ChatTokenizer
from motet.train.input.datasets import say_no_end
from unit.data.samples import a_record, train_backend

ENDLESS = "{% for m in messages %}{{ m.role + ': ' + m.content + ' ' }}{% endfor %}"


class Beginning(Dataset):
    def __init__(self, record):
        self.first = parse_conversation(record, "here")

    def conversation(self, example_id):
        return self.first


def said(vocabulary, record):
    sentences = []
    say_no_end(vocabulary, Beginning(record), sentences.append)
    return "".join(sentences)


def test_that_no_end_is_learned_is_said():
    backend = train_backend()
    endless, ending = (ChatTokenizer(backend, template, {"eos_token": "<eos>"}) for template in (ENDLESS, None))
    assert "so no end of it is learned" in said(endless, a_record())
    assert said(endless, {"text": "A document."}) == ""
    assert said(ending, a_record()) == said(DrawnVocabulary(8), a_record()) == ""
