"""Greedy answers: the same on any number of ranks, packed or one by one."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from cli.tiny_job import write_tiny_job
from motet.core.errors import UserError
from motet.core.example import TokenSequence
from motet.data.chat_template import DEFAULT_TEMPLATE
from motet.data.dataset import Dataset
from motet.data.text import ChatTokenizer
from motet.dispatch import pack
from motet.train.evaluate import EvaluateConfig, EvaluationProgress, answer_to, check_prompts
from motet.train.job import build_job
from motet.train.recipe.recipe_file import load_recipe
from motet.train.world import join_world
from ranks import run_ranks
from unit.data.samples import TEMPLATE, a_record, train_backend, write_manifest


def evaluate(rank, num_ranks, recipe, overrides):
    EvaluationProgress.__init__.__defaults__, said = (0.0,), []
    with join_world("cpu") as world, ExitStack() as cleanup:
        job = build_job(load_recipe(Path(recipe), overrides), world, "never", said.append, cleanup)
        with torch.no_grad():
            for weight in job.model.parameters():
                # As initialised, a model says the same to everything.
                weight.mul_(6 if weight.ndim > 1 else 1)
        found = job.evaluator.run(job.model)
        answers = {answer.place: answer.answer for answer in found.samples}
        return found.loss, answers, reference(job), [each for each in said if each.startswith("Evaluating")]


def reference(job):
    """Each prompt on its own, each token by a pass of the whole model; None where the model is spread over ranks."""
    if job.world.num_ranks > 1:
        return None
    evaluator, answers = job.evaluator, {}
    dataset, tokenizer = evaluator._dataset, evaluator._tokenizer
    for place in range(dataset.num_examples):
        prompt, refs, _ = dataset.prompt(place)
        items = {"image": [], "audio": []}
        for phase, media in zip(prompt.media, evaluator._decoder.load(refs)):
            items[phase].append(media)
        features, rows = {}, {}
        for phase, media in items.items():
            module = job.model.encoders[phase]
            rows[phase] = np.empty(0, np.int64)
            if media:
                sizes = np.stack([item.size for item in media])
                rows[phase] = module.num_tokens(sizes)
                values = torch.from_numpy(np.concatenate([item.values for item in media])).double()
                features[phase] = module.eval()(values, torch.from_numpy(sizes))
        packed = pack([prompt], rows)
        written = []
        for _ in range(evaluator._config.max_new_tokens):
            token = int(job.model.backbone.eval().next_tokens(packed, features)[0])
            if token in tokenizer.end_tokens:
                break
            written.append(token)
            tokens = torch.cat([packed.tokens, torch.tensor([token])])
            targets = torch.zeros(len(tokens), dtype=torch.bool)
            packed = type(packed)(tokens, targets, torch.tensor([0, len(tokens)]), packed.feature_positions)
        answers[place] = tokenizer.decode(np.array(written, dtype=np.int64), special=True)
    return answers


def test_answers_do_not_depend_on_ranks_or_packing(tmp_path):
    job = write_tiny_job(tmp_path / "data", num_heldout=11)
    overrides = [f"run.dir={tmp_path}", "run.dtype=float64", "evaluate.batch_size=5", "evaluate.max_new_tokens=9"]
    loss, answers, expected, said = run_ranks(evaluate, 1, str(job), overrides)[0]
    assert said == [f"Evaluating: {number} of 11 held-out examples so far." for number in (5, 10)]
    assert answers == expected
    assert len(answers) == 11
    assert len(set(answers.values())) > 3
    for result in run_ranks(evaluate, 3, str(job), overrides):
        assert result[0] == pytest.approx(loss, rel=1e-10)
        assert result[1] == answers


def build_refused(rank, num_ranks, recipe, overrides):
    with join_world("cpu") as world, ExitStack() as cleanup, pytest.raises(UserError) as caught:
        build_job(load_recipe(Path(recipe), overrides), world, "never", lambda _: None, cleanup)
    return str(caught.value)


def test_a_prompt_that_cannot_be_made_stops_all_ranks_alike_before_a_step(tmp_path):
    """Only the last rank sees it: the template takes the conversation, but not the nothing that stands before it."""
    job = write_tiny_job(tmp_path / "data")
    template = job.parent / "tokenizer" / "chat_template.jinja"
    template.write_text("{% if not messages %}{{ raise_exception('no message') }}{% endif %}" + DEFAULT_TEMPLATE)
    with (job.parent / "heldout.jsonl").open("a") as file:
        file.write('{"conversations": [{"from": "gpt", "value": "a"}], "task": null}\n')
    said = run_ranks(build_refused, 2, str(job), [f"run.dir={tmp_path}"])
    assert len(set(said)) == 1
    assert "heldout.jsonl, line 9: has no prompt to answer (the tokenizer's chat template refuses" in said[0]


def test_special_tokens_of_an_answer_are_compared(tmp_path):
    """Qwen2-VL's marks of boxes are special tokens."""
    tokenizer = ChatTokenizer(train_backend(), TEMPLATE, {"bos_token": "<bos>", "eos_token": "<eos>"})
    manifest = write_manifest(tmp_path / "a.jsonl", [a_record("Where?", "A cat <pad>(1,2)<pad>")])
    dataset = Dataset.open([manifest], tokenizer, {})
    learned = dataset.tokens(0)
    tokens = [token for token in learned.tokens[learned.targets].tolist() if token not in tokenizer.end_tokens]
    assert answer_to(dataset, tokenizer, 0, tokens).is_exact
    assert not answer_to(dataset, tokenizer, 0, [token for token in tokens if token != 0]).is_exact


class HeldOut:
    """Held-out examples of two answers each, of which the last has so many tokens, and one that ends it."""

    def __init__(self, *lengths):
        self.lengths, self.num_examples = lengths, len(lengths)

    def has_answer(self, example):
        return self.lengths[example] > 0

    def prompt(self, example):
        return None, [], ""

    def tokens(self, example):
        targets = [False] * 3 + [True] * 40 + [False] * 2 + [True] * (self.lengths[example] + 1)
        return TokenSequence(np.zeros(len(targets), np.int64), np.array(targets), (), np.empty(0, np.int64))


def test_answers_that_are_longer_than_what_is_written_are_said():
    for most, lengths, words in ((5, (3, 9, 0, 6), "2 of 3 held-out answers have more than"), (9, (3, 9), "")):
        said = []
        with join_world("cpu") as world:
            check_prompts(HeldOut(*lengths), EvaluateConfig(max_new_tokens=most), world, said.append)
        assert "".join(said).startswith(words) and bool(said) == bool(words)
        assert not said or "evaluate.max_new_tokens = 5 tokens, up to 9: they" in said[0]
