import numpy as np
import pytest

from motet.core.errors import UserError
from motet.core.sampler import Distribution, read_sampler

MIXTURE = """
[[task]]
name = "text"
text = { median = 1000, spread = 1.0, min = 12, max = 16000 }

[[task]]
name = "image chat"
share = 3.0
text = { median = 70, spread = 0.8, min = 8, max = 5000 }
answer = 0.5
[task.items.image]
count = { choices = [1, 3], weights = [3, 1] }
length = { value = 1025 }
length_per_token = 4
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "workload.toml"
    path.write_text(MIXTURE)
    return path


def test_tasks_have_their_shares_and_lengths(path):
    batch = read_sampler(path).workload(seed=1, num_examples=4000).examples
    images = batch.items["image"]
    chats = np.unique(images.example)
    assert len(chats) == 3000 and chats.min() == 1000
    assert (images.length == 1025).all() and (images.num_tokens == 257).all()
    assert images.num_items / len(chats) == pytest.approx(1.5, rel=0.05)
    assert np.median(batch.sequence[:1000]) == pytest.approx(1000, rel=0.1)
    text = batch.sequence - np.bincount(images.example, images.num_tokens, 4000)
    assert text[:1000].min() >= 12 and text.max() <= 16000
    np.testing.assert_array_equal(batch.num_targets[:1000], text[:1000])
    np.testing.assert_array_equal(batch.num_targets[1000:], np.rint(text[1000:] / 2))


def test_a_seed_gives_the_same_examples(path):
    sampler = read_sampler(path)
    first, again, other = (sampler.workload(seed).examples.sequence for seed in (3, 3, 4))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("task = []", "task: "),
        ("[[task]]\nname = 'a'\ntext = {}", "one of value, choices, median"),
        ("[[task]]\nname = 'a'\ntext = { median = 3, min = 9, max = 2 }", "min above max"),
        ("[[task]]\nname = 'a'\ntext = { value = 3, min = 9 }", "min, which has no effect without median"),
        ("[[task]]\nname = ''\ntext = { value = 3 }", "task.0.name: "),
        ("[[task]]\nname = 'a'\ntext = { choices = [1], weights = [1, 2] }", "as many weights"),
        ("[[task]]\nname = 'a'\ntexts = 3\ntext = { value = 1 }", "texts"),
        ("[[task", "no valid TOML"),
        ("a = " + "[" * 100_000, "nests lists and tables"),
        ("a = " + "1" * 5000, "has a number of more than"),
        ("[[task]]\nname = 'a'\ntext = { choices = [3, -1] }", "task.0.text.choices.1: "),
        ("[[task]]\nname = 'a'\ntext = { choices = [1, 2], weights = [0, 0] }", "a weight above 0"),
        ("[[task]]\nname = 'a'\ntext = { choices = [1, 2], weights = [-1, 2] }", "task.0.text.weights.0: "),
        ("[[task]]\nname = 'a'\ntext = { choices = [1, 2], weights = [inf, 2] }", "task.0.text.weights.0: "),
        ("[[task]]\nname = 'a'\ntext = { value = 10000000000000000000000 }", "task.0.text.value: "),
        ("[[task]]\nname = 'a'\ntext = { median = inf }", "task.0.text.median: "),
        ("[[task]]\nname = 'a'\nshare = inf\ntext = { value = 1 }", "task.0.share: "),
        ("[[task]]\nname = 'a'\ntext = { value = 1 }\n[task.items.image]\nlength = { value = 5 }\n"
         "length_per_token = 1e-300", "task.0.items.image.length_per_token: "),
        ("[[task]]\nname = 'a'\ntext = { value = 1 }\n[task.items.image]\nlength = { value = 5 }\nsegment = 0",
         "task.0.items.image.segment: "),
        ("[[task]]\nname = 'a'\ntext = { value = 1 }\n[task.items.image]\nlength = { value = 5 }\nnum_tokens = 0",
         "task.0.items.image.num_tokens: "),
        ("[[task]]\nname = 'a'\ntext = { value = 1 }\n[task.items.image]\nlength = { value = 5 }\nnum_tokens = 2\n"
         "length_per_token = 4", "num_tokens and length_per_token, which both say how many rows"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_one_sentence(tmp_path, text, says):
    path = tmp_path / "workload.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=says) as error:
        read_sampler(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(UserError, match="Cannot read"):
        read_sampler(tmp_path / "absent.toml")


def test_items_that_would_fill_the_memory_are_refused(tmp_path):
    path = tmp_path / "workload.toml"
    path.write_text(MIXTURE.replace("choices = [1, 3], weights = [3, 1]", "value = 1000000000"))
    with pytest.raises(UserError, match="Task 'image chat' has 3,000,000,000 items of 'image' in 3 examples"):
        read_sampler(path).workload(num_examples=4)


def test_items_are_cut_into_segments(tmp_path):
    path, text = tmp_path / "workload.toml", "[[task]]\nname = 'a'\ntext = { value = 3 }\n[task.items.image]\n"
    path.write_text(text + "length = { choices = [10, 4, 0] }\nsegment = 4\n")
    images = read_sampler(path).workload(num_examples=50).examples.items["image"]
    expected = {10: [4, 4, 2], 4: [4], 0: []}
    segments = np.split(images.segments.length, images.segments.offsets[1:-1])
    assert [each.tolist() for each in segments] == [expected[length] for length in images.length.tolist()]
    path.write_text(text + "length = { value = 1000000000 }\nsegment = 1\n")
    with pytest.raises(UserError, match="Task 'a' has 3,000,000,000 segments of 'image' in 3 examples"):
        read_sampler(path).workload(num_examples=3)


def test_items_take_as_many_tokens_as_is_said_whatever_their_length(tmp_path):
    path = tmp_path / "workload.toml"
    path.write_text(MIXTURE.replace("length = { value = 1025 }", "length = { choices = [3, 900] }"))
    drawn = read_sampler(path).workload(num_examples=40).examples
    path.write_text(path.read_text().replace("length_per_token = 4", "num_tokens = 2"))
    made = read_sampler(path).workload(num_examples=40).examples
    assert drawn.items["image"].length.tolist() == made.items["image"].length.tolist()
    assert set(made.items["image"].num_tokens) == {2} and set(drawn.items["image"].num_tokens) == {1, 225}
    assert (made.sequence - drawn.sequence).sum() == (2 - drawn.items["image"].num_tokens).sum()


@pytest.mark.parametrize(
    ("distribution", "bounds"),
    [
        ({"value": 7}, (7, 7)),
        ({"choices": (9, 2, 30), "weights": (1, 2, 0)}, (2, 9)),
        ({"median": 8, "spread": 0.5, "min": 3, "max": 60}, (3, 60)),
        ({"median": 80.5, "min": 3, "max": 60}, (60, 60)),
    ],
)
def test_bounds_are_those_of_what_is_drawn(distribution, bounds):
    read = Distribution(**distribution)
    drawn = read.sample(4000, np.random.default_rng(0))
    assert read.bounds == bounds and bounds[0] <= drawn.min() <= drawn.max() <= bounds[1]


def test_choices_without_weights_are_equally_likely():
    drawn = Distribution(choices=(2, 7)).sample(4000, np.random.default_rng(0))
    assert (drawn == 7).mean() == pytest.approx(0.5, abs=0.03)
