"""What is wrong in a recipe is said in one sentence with file, line and key, and ends with exit code 2."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cli.tiny_job import RECIPE
from motet.cli import main
from motet.train.run_folder import outputs_named
from ranks import TIMEOUT_S


def run(capsys, monkeypatch, *arguments):
    """What the command line prints on stderr; it must exit with 2."""
    monkeypatch.setattr(sys, "argv", ["motet", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said
    return said


def line_of(text, part):
    return next(number for number, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ("lr = 3e-3", "lrr = 3e-3", "lrr", "unknown key 'optimizer.lrr'; did you mean 'lr'?"),
        ("hidden_size = 32\ninter", "hiden_size = 32\ninter", None, "has no option hiden_size"),
        ("steps = 8", 'steps = "many"', "steps", "'run.steps' must be a whole number, not 'many'."),
        (
            "num_workers = 0",
            "num_workers = 0\nshuffle = false\nseed = 3",
            "[data]",
            "seed = 3 has no effect with shuffle = false; remove",
        ),
        ("steps = 8", "steps = 0", "steps", "'run.steps' must be greater than 0, not 0."),
        ('train = ["train.jsonl"]', "train = []", "train", "'data.train' must have at least 1 entry, not 0."),
        ("steps = 8", "", "[run]", "'run' is wrong: it has neither steps nor epochs; give steps, the optimizer steps"),
        ("steps = 8", "steps = 8\nepochs = 1", "[run]", "steps = 8 and epochs = 1 both say how long it runs; remove"),
        ("steps = 8", "epochs = 0", "epochs", "'run.epochs' must be greater than 0, not 0"),
        ("warmup_steps = 4", 'schedule = "cosin"', "schedule", "'cosine', 'linear', 'constant' or 'wsd', not 'cosin'."),
        ("batch_size = 6", "batch_size = 6\nmicrobatches = 4", "[run]", "microbatches = 4 must divide batch_size = 6"),
        ("seed = 3", "num_workers = 3", "num_workers", "'num_workers' belongs into [data]"),
        (
            'projector = { kind = "linear" }',
            'projector = { kind = "linear" }\ntrain = false',
            "train = false",
            "unknown key 'model.encoders.image.train'; did you mean 'train_encoder' or 'train_projector'?",
        ),
        (
            "[model.backbone]",
            "[model]\ntrain = { backbone = false }\n\n[model.backbone]",
            "train = {",
            "model.backbone.train, ",
        ),
        ("[transforms.image]\npatch_size", "[transforms.image]\npatchsize", "patchsize", "did you mean 'patch_size'?"),
        ("[optimizer]", "[optimiser]", "[optimiser]", "unknown key 'optimiser'; did you mean 'optimizer'?"),
        (
            'family = "qwen2"',
            'family = "qwen9"',
            'family = "qwen9"',
            "'mixtral', 'qwen3_moe', 'granite', 'gpt2', 'opt' or 'internlm2'",
        ),
        ("[data]", "[data]\ngroup = 3", "group", "'data.group' must be 'auto'"),
        ('heldout = ["heldout.jsonl"]\n', "", None, "[evaluate] has no effect without data.heldout; name held-out"),
        (
            "[data]",
            "[data]\ngroup = { image = 0 }",
            "group",
            "'data.group.image' must be greater than or equal to 1, not 0",
        ),
        ("[data]", "[data]\ngroup = { image = 1.5 }", "group", "'data.group.image' must be a whole number, not 1.5."),
        (
            "[data]",
            "[data]\ngroup = 'auto'\nshuffle = false",
            None,
            "data.shuffle = false, as groups take examples at random",
        ),
        ("num_mels = 20", "num_mels = true", "num_mels", "'transforms.audio.num_mels' must be a whole number"),
        (
            "[optimizer]",
            '[fsdp]\nrecompute = "al"\n[optimizer]',
            "recompute",
            """'al' is neither true, false, "auto" nor""",
        ),
        (
            "[optimizer]",
            "[fsdp]\nrecompute = 1\n[optimizer]",
            "recompute",
            '1 is neither true, false, "auto" nor a table',
        ),
        (
            "[optimizer]",
            "[fsdp]\nrecompute = { backbone = -1 }\n[optimizer]",
            "recompute",
            "backbone = -1 is no number of blocks, which is a whole number from 1 on",
        ),
        (
            "[optimizer]",
            "[fsdp]\nonce_a_step = true\n[optimizer]",
            "[fsdp]",
            "once_a_step needs reshard_after_forward = false: what is gathered once a step must stay",
        ),
        (
            "[transforms.audio]\nnum_mels = 20",
            "",
            None,
            "needs a table [transforms.audio] that says what it is given: an empty one is Whisper's, 80 mel",
        ),
    ],
)
def test_wrong_keys_and_values(job, capsys, monkeypatch, old, new, key, said):
    text = RECIPE.replace(old, new, 1)
    path = job.with_name("wrong.toml")
    path.write_text(text)
    sentence = run(capsys, monkeypatch, "train", path)
    assert said in sentence
    if key is not None:
        assert sentence.startswith(f"{path}, line {line_of(text, key)}: ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("run.batch_size=8", "run.microbatches=2"),
            "run.microbatches = 2 has no effect with data.group: a microbatch",
        ),
        (("balance.mode=exchange",), 'data.group beside balance.mode = "exchange", whose lengths are not known before'),
        (("balance.policy=packed",), "data.group keeps a rank's microbatch below caps by what it computes, and"),
        (("data.group={ image = 99 }",), "data.group has caps of image; it must have one of each phase of the model: "),
        (
            ("data.group={}",),
            "data.group has caps of nothing; it must have one of each phase of the model: image, audio",
        ),
        (("data.group={ image = 1, audio = 1, backbone = 1 }",), "data.group: no example is under all caps, so none"),
    ],
)
def test_groups_that_cannot_be_trained(job, capsys, monkeypatch, overrides, said):
    options = [word for override in ("data.group=auto", *overrides) for word in ("--set", override)]
    assert said in run(capsys, monkeypatch, "train", job, *options)


def test_bad_toml_names_the_line(job, capsys, monkeypatch):
    path = job.with_name("bad.toml")
    path.write_text("[run]\nsteps = = 3\n")
    assert "is no valid TOML: Invalid value (at line 2, column 9)" in run(capsys, monkeypatch, "train", path)


def test_missing_files(job, capsys, monkeypatch):
    assert "Cannot read the recipe" in run(capsys, monkeypatch, "train", job.with_name("absent.toml"))
    assert "absent.jsonl" in run(capsys, monkeypatch, "train", job, "--set", 'data.train=["absent.jsonl"]')
    assert "no such directory" in run(capsys, monkeypatch, "train", job, "--set", "data.tokenizer=absent")
    assert "is no complete Motet checkpoint" in run(capsys, monkeypatch, "train", job, "--resume", "absent")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("optimizer.lrr=1", "--set optimizer.lrr: unknown key 'optimizer.lrr'; did you mean 'lr'?"),
        (
            "model.bakbone.train=true",
            "--set model.bakbone.train: unknown key 'model.bakbone'; did you mean 'backbone'?",
        ),
        ("optimizer.lr=big", "--set optimizer.lr: 'optimizer.lr' must be a number, not 'big'."),
        ("optimizer.lr", "must be written as table.key=value"),
        ("~optimizer.lr=1", "or as ~table.key, which removes the key"),
        ("~optimizer.momentum", "--set ~optimizer.momentum: the recipe does not have this key, so there is nothing"),
        ("~optimizer.lr", "--set optimizer.lr: 'optimizer.lr' is missing and has no default"),
        ("run.dir=", "has no value; '~run.dir' removes the key, and 'run.dir=\"\"' is an empty text."),
        ("run.dir.x=1", "'dir' is a value in the recipe, not a table"),
        (
            "balance={ phases = 'off', method = 'per_phase' }",
            'method = "per_phase" has no effect with phases = "off", which balances no encoder; remove it',
        ),
        (
            "transforms.image={ patch_size = 4, fixed_size = 16, max_pixels_side = 400 }",
            "max_pixels_side has no effect beside fixed_size, the size of every image; remove it",
        ),
        (
            "fsdp={ shard_size = 1, reshard_after_forward = false }",
            "reshard_after_forward = false has no effect with shard_size = 1, as each rank holds a whole copy",
        ),
        (
            "fsdp={ shard_size = 1, reshard_after_forward = false, once_a_step = true }",
            "and gathers nothing; remove it, and once_a_step.",
        ),
        (
            "balance={ phases = 'off', method = 'joint' }",
            'balance.method = "joint" places whole examples so that all phases are balanced at once: balance.phases',
        ),
        (
            "balance={ phases = 'off', method = 'split' }",
            'balance.method = "split" compares times of all phases: balance.phases must be "all", not "off"',
        ),
        (
            "balance={ phases = 'off', speed = { device_tflops = 3 } }",
            'it has no effect with balance.phases = "off"; remove it',
        ),
        (
            "balance={ phases = 'off', mode = 'exchange', transport = 'device' }",
            'transport = "device" is for inputs that move between ranks, and with phases = "off" none does; remove it',
        ),
        ('balance.phases=["video"]', "there is no phase 'video'"),
        ("balance.method=jointly", "'balance.method' must be 'auto', 'joint', 'per_phase' or 'split', not 'jointly'."),
        (
            "balance.policy=pad",
            "'balance.policy' must be 'auto', 'packed', 'padded' or 'padded_attention', not 'pad'.",
        ),
        ("balance.policy={ image = 'pad' }", "'balance.policy.image' must be 'auto', 'packed', 'padded'"),
        ("balance.policy={ video = 'padded' }", "balance.policy: there is no phase 'video'; the model has backbone"),
        ("balance.policy=padded_attention", 'with cost = "flops" an item has one figure; set cost = "length"'),
        (
            "balance={ policy = { image = 'padded_attention' }, cost = 'length' }",
            "takes both coefficients, at least 1 each; set balance.costs.image = { linear = ..., quadratic = ... }",
        ),
        (
            "balance={ phases = 'backbone', policy = 'packed' }",
            'balance.policy = "packed" is of encoders, and none is balanced; remove it',
        ),
        (
            "balance={ phases = ['image'], policy = { backbone = 'padded' } }",
            "balance.policy: phase 'backbone' is not balanced, so it has no policy; remove it",
        ),
        # A union of plain types is named by its key alone.
        ("balance.phases=7", "'balance.phases' must be 'off', 'backbone' or 'all', not 7."),
        ("balance.policy=7", "--set balance.policy: 'balance.policy' must be"),
        ("balance.defer=on", "'balance.defer' must be 'auto' or 'off', not 'on'."),
        (
            "balance={ phases = 'backbone', defer = 'auto' }",
            'defer = "auto" compares times of all phases, and phases = "backbone" balances not all',
        ),
        (
            "balance={ phases = ['image'], defer = 'auto' }",
            'balance.defer = "auto" compares times of all phases: it has no effect with balance.phases = ["image"]',
        ),
        ("balance.communicator=gather", "'balance.communicator' must be 'all_to_all' or 'all_gather', not 'gather'."),
        (
            "balance={ phases = 'backbone', communicator = 'all_gather' }",
            'communicator is for what moves between ranks, and nothing does: mode = "auto", phases = "backbone"',
        ),
        (
            "balance={ mode = 'exchange', phases = 'off', node_wise = false }",
            'node_wise is for what moves between ranks, and nothing does: mode = "exchange", phases = "off"',
        ),
        ("balance.transport=device", 'transport = "device" is for inputs that move between ranks, and without mode ='),
        (
            "balance={ mode = 'exchange', transport = 'device' }",
            'balance.transport = "device" moves inputs over the links of GPUs, and this run is on the CPU; remove it.',
        ),
        (
            "data.train=['train-{rank}.jsonl']",
            'balance.mode = "auto" takes examples that every rank can read, and with {rank} in data.train each rank',
        ),
        ("data.train=['{rank}.jsonl', 'train.jsonl']", "train.jsonl in train is the same for all ranks"),
        ("data.num_splits=2", "num_splits has no effect without {rank} in the names of train; remove it"),
        (
            "balance.speed.device_tflops=0",
            "'balance.speed.device_tflops' must be greater than or equal to 0.000001, not 0.",
        ),
        # Numbers that would hang, fill the memory, or leave all data out without a word.
        ("run.batch_size=1000000000000", "'run.batch_size' must be less than or equal to 1000000, not 1000000000000."),
        ("run.steps=10000000000", "'run.steps' must be less than or equal to 1000000000"),
        ("run.seed=9223372036854775808", "'run.seed' must be less than or equal to 9223372036854775807"),
        ("data.seed=9223372036854775808", "'data.seed' must be less than or equal to 9223372036854775807"),
        ("data.num_workers=1000000", "'data.num_workers' must be less than or equal to 256"),
        ("data.prefetch_steps=1000000000", "'data.prefetch_steps' must be less than or equal to 64"),
        (
            'data.too_long="truncate"',
            "too_long has no effect without max_sequence_length; set that, or remove too_long",
        ),
        ("data.max_sequence_length=10000000000", "'data.max_sequence_length' must be less than or equal to 2147483647"),
        ("data.max_bad_fraction=nan", "'data.max_bad_fraction' must be less than or equal to 1, not nan."),
        ('run.report_to=["wandb","wandb"]', "it names 'wandb' twice; name each service once"),
        ("evaluate.max_new_tokens=10000000000", "'evaluate.max_new_tokens' must be less than or equal to 1000000"),
        (
            "transforms.audio.n_fft=2000000000",
            "'transforms.audio' is wrong: n_fft must be from 2 to 16,384, not 2000000000.",
        ),
        ("transforms.audio.hop_length=100000000", "hop_length must be from 1 to 16,384, not 100000000."),
        ("transforms.audio.max_seconds=nan", "max_seconds must be from 0.001 to 86,400, not nan."),
        ("transforms.audio.num_mels=300", "leaves 67 bands without a frequency of n_fft = 400"),
        ("transforms.image.std=[inf]", "'transforms.image' is wrong: std must be from 0.001 to 1, not (inf,)."),
        ("transforms.image.mean=[-inf]", "mean must be from 0 to 1, not (-inf,)."),
        ("transforms.image.max_pixels_side=100000000", "max_pixels_side must be from 1 to 16,384, not 100000000."),
        ("data.train=['train-{0..999999999}.tar']", "its braces name 1,000,000,000 shards, more than 100,000"),
        ("data.train=['/dev/zero']", "manifest /dev/zero: /dev/zero is a device, but must be a regular file"),
        ("transforms.image.channels=3", "channels is 3, but model.encoders.image takes rows with channels = 1"),
        ("transforms.image.merge_size=4", "merge_size is 4, but model.encoders.image takes rows with merge_size = 2"),
        ("model.backbone.config.num_hidden_layers=1000000000", "num_hidden_layers is 1000000000; it must be a whole"),
        (
            "model.encoders.audio.config.init_std=inf",
            "model.encoders.audio.config.init_std is inf; it must be a number",
        ),
        ("model.encoders.image.projector.downsample=2", "squares are joined: it must be 1, 4, 9, 16"),
        # Readers, callbacks, queries and weights.
        ("model.encoders.video.module='a:B'", "model.encoders.video does not say what it reads"),
        ("model.encoders.keys={ reads = 'image', module = 'a:B' }", "'keys' cannot name an encoder"),
        ("model.encoders.image.reads=audio", "an encoder named 'image' reads image, not audio; give it another name"),
        (
            "model.encoders.dino={ reads = 'image', module = 'a:B' }",
            "image and dino read every image, so it must be said what the backbone is given of it: model.combine",
        ),
        ("model.combine.image=rows", "model.combine.image has no effect, as fewer than two encoders read image"),
        ("transforms.dino={ patch_size = 4 }", "transforms.dino has no effect, as there is no model.encoders.dino"),
        ("model.encoders.image.before=os:nothing", "model.encoders.image.before = 'os:nothing': cannot be imported"),
        ("model.encoders.image.between=os:sep", "model.encoders.image.between = 'os:sep': is str, which cannot be"),
        ("model.encoders.audio.after=os:getcwd", "is called with 2 arguments, rows, sizes, and takes ()"),
        (
            "model.merge=os.path:basename",
            "model.merge = 'os.path:basename': is called with 3 arguments, embeds, features",
        ),
        ("model.encoders.image.projector.queries=4", "`queries` is for resampler and qformer only, not for 'linear'"),
        ("model.encoders.image.projector.kind=qformer", "a qformer needs `queries`"),
        ("data.mixture=[1, 2]", "mixture has 2 weights for 1 manifest of train; give each one, in their order"),
        (
            "run={ dir = 'run', batch_size = 8, epochs = 1, profile_steps = [0] }",
            "'run' is wrong: profile_steps has 0, and the steps are 1 to the last",
        ),
        ("data.mixture=[1]", "mixture has no effect with one manifest; remove it"),
        ("data.mixture=[0]", "'data.mixture.0' must be greater than 0, not 0"),
    ],
)
def test_overrides(job, capsys, monkeypatch, override, said):
    assert said in run(capsys, monkeypatch, "train", job, "--set", override)


def test_an_encoder_of_any_name_with_a_transform_is_asked_what_it_reads(job, capsys, monkeypatch):
    given = "model.encoders.photo={ module = 'a:B' }", "transforms.photo={ patch_size = 4 }"
    said = run(capsys, monkeypatch, "train", job, *(word for each in given for word in ("--set", each)))
    assert 'model.encoders.photo does not say what it reads, and is not named after it: give it reads = "image"' in said


@pytest.mark.parametrize(
    ("train", "run_dir", "output"),
    [
        ("*.jsonl", ".", "metrics.jsonl"),
        ("*", ".", "run.lock"),
        ("*/*.jsonl", "run", "run/metrics.jsonl"),
        ("{train,heldout}.jsonl", ".", "heldout.jsonl"),
    ],
)
def test_data_that_a_run_writes_itself_are_refused(job, capsys, monkeypatch, train, run_dir, output):
    """The next run, or the same one that goes on, would read them."""
    folder = job.parent
    options = ("--set", f"data.train=['{train}']", "--set", f"run.dir={run_dir}", "--set", "balance.mode=exchange")
    said = run(capsys, monkeypatch, "train", job, *options)
    assert f"{folder / train} in data.train names {folder / output} as well, which the run itself writes" in said


@pytest.mark.parametrize("manifest", ["train.jsonl", "*/*.jsonl", "train-*.json", "{rank:05d}.json", "shards-*.tar"])
def test_data_beside_what_a_run_writes_are_none_of_it(manifest):
    assert not outputs_named(Path("/data"), f"/data/{manifest}")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("fsdp.recompute=auto", 'fsdp.recompute = "auto" takes the lengths of all examples, which no rank knows with'),
        ("balance.defer=auto", 'balance.defer = "auto" takes the lengths of all examples of a step, which no rank'),
    ],
)
def test_what_takes_lengths_that_all_ranks_know_is_refused_for_splits(job, capsys, monkeypatch, option, said):
    splits = ("data.train=['train-{rank}.jsonl']", "balance.mode=exchange", option)
    assert said in run(capsys, monkeypatch, "train", job, *(word for split in splits for word in ("--set", split)))


def test_arguments_that_are_not_utf_8(job, capsys, monkeypatch):
    said = run(capsys, monkeypatch, "train", job, "--set", "run.dir=x\udcff")
    assert said.strip() == r"The argument 'run.dir=x\udcff' is not UTF-8; name it by whole characters."


def test_manifest_line_that_is_no_json(job, capsys, monkeypatch):
    path = job.with_name("broken.jsonl")
    path.write_text('{"conversations": [}\n')
    said = run(capsys, monkeypatch, "train", job, "--set", f'data.train=["{path}"]')
    assert f"{path}, line 1: is no JSON" in said


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("tokenizer.json", b"{", "tokenizer.json: is no tokenizer of the tokenizers library (EOF"),
        ("tokenizer_config.json", b"[" * 100_000, "tokenizer_config.json: nests lists and tables more than 100 deep"),
        ("chat_template.jinja", b"{% for %}", "the tokenizer's chat template is no Jinja (line 1: "),
        ("chat_template.jinja", b"{{ 1 / 0 }}", "line 1: the tokenizer's chat template refuses the conversation: Zero"),
    ],
)
def test_a_damaged_tokenizer(job, tmp_path, capsys, monkeypatch, name, data, said):
    shutil.copytree(job.with_name("tokenizer"), tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / name).write_bytes(data)
    assert said in run(capsys, monkeypatch, "train", job, "--set", f"data.tokenizer={tmp_path / 'tokenizer'}")


def test_a_recipe_with_a_number_of_thousands_of_digits(job, capsys, monkeypatch):
    said = run(capsys, monkeypatch, "train", job, "--set", "run.steps=" + "1" * 5000)
    assert "has a number of more than 4,300 digits" in said
    path = job.with_name("long.toml")
    path.write_text("[run]\nsteps = " + "1" * 5000)
    assert run(capsys, monkeypatch, "train", path) == f"{path}: has a number of more than 4,300 digits."


@pytest.mark.slow
def test_a_real_process_says_one_sentence_and_exits_with_2(job):
    command = [sys.executable, "-m", "motet", "train", str(job), "--set", "run.step=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 2
    assert done.stderr == "--set run.step: unknown key 'run.step'; did you mean 'steps'?\n"


def test_numbers_in_quotes_are_refused(job, capsys, monkeypatch):
    said = run(capsys, monkeypatch, "train", job, "--set", 'run.steps="8"')
    assert said == "--set run.steps: 'run.steps' must be a whole number, not '8'."


def test_a_resolved_recipe_loads_again_to_the_same(job, tmp_path):
    from motet.train.recipe.recipe_file import dump_recipe, load_recipe

    recipe = load_recipe(job, ["optimizer.clip_norm=inf", "fsdp.shard_size=1"])
    assert recipe.run.dir == job.parent / "run"
    assert recipe.data.train == (str(job.parent / "train.jsonl"),)
    again = tmp_path / "elsewhere.toml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe


PHASES = """\
[[run.phase]]
name = "align"
steps = 40
learns = "projectors"

[[run.phase]]
name = "tune"
steps = 5
data = { seed = 7 }

[data]
"""


@pytest.mark.parametrize(
    ("old", "new", "key", "said"),
    [
        ("steps = 40", "stepz = 40", "stepz", "unknown key 'run.phase.0.stepz'; did you mean 'steps'?"),
        ("steps = 40", 'steps = "4"', 'steps = "4"', "'run.phase.0.steps' must be a whole number, not '4'."),
        ("steps = 40\n", "", "[[run.phase]]", "phase align has neither steps nor epochs; give one of them."),
        ('"projectors"', '"projector"', "learns", "the model has no part 'projector' that could learn; it has all,"),
        ("seed = 7", "sed = 7", "data = {", "unknown key 'data.sed'; did you mean 'seed'?"),
        ('"tune"', '"align"', 'name = "align"', "two phases are named 'align'; each needs a name of its own."),
        ('"tune"', '"../tune"', '"../tune"', "'run.phase.1.name'"),
        (
            "batch_size = 6",
            "batch_size = 6\nsteps = 8",
            "steps = 8",
            "run.steps has no effect, as each phase has its own.",
        ),
    ],
)
def test_what_is_wrong_with_a_phase(job, tmp_path, capsys, monkeypatch, old, new, key, said):
    text = RECIPE.replace("steps = 8\n", "").replace("[data]\n", PHASES, 1)
    assert text.count(old) == 1
    wrong = job.with_name("phased.toml")
    wrong.write_text(text.replace(old, new))
    found = run(capsys, monkeypatch, "train", wrong, "--set", f"run.dir={tmp_path / 'run'}")
    assert said in found
    lines = [number for number, line in enumerate(wrong.read_text().splitlines(), 1) if key in line]
    assert any(found.startswith(f"{wrong}, line {number}: ") for number in lines)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("said_of_it", "said"),
    [
        ('data = { train = ["nothing.jsonl"] }', "nothing.jsonl: there is no such file"),
        ('model = { freeze = ["*"] }', "Nothing learns: every weight of the model is frozen"),
        ("model = { encoders = { image = { config = { patch_size = 8 } } } }", "transforms.image.patch_size"),
    ],
)
def test_what_is_wrong_with_a_later_phase_is_said_before_the_first_one_trains(
    job, tmp_path, capsys, monkeypatch, said_of_it, said
):
    phased = job.with_name("phased.toml")
    text = RECIPE.replace("steps = 8\n", "").replace("[data]\n", PHASES, 1)
    phased.write_text(text.replace("data = { seed = 7 }", said_of_it))
    found = run(capsys, monkeypatch, "train", phased, "--set", f"run.dir={tmp_path / 'run'}")
    assert found.startswith("Phase tune: ") and said in found
    assert not (tmp_path / "run").exists()


def test_commands_on_a_recipe_in_phases_ask_for_one(job, tmp_path, capsys, monkeypatch):
    phased = job.with_name("phased.toml")
    phased.write_text(RECIPE.replace("steps = 8\n", "").replace("[data]\n", PHASES, 1))
    for command in ("simulate", "analyze", "profile"):
        said = run(capsys, monkeypatch, command, phased)
        assert said == f"{phased} trains in phases (align, tune): choose one with --set run.phase=align."
    assert "it has align, tune." in run(capsys, monkeypatch, "plan", phased, "--set", "run.phase=other")
    assert "a plan is of one" in run(capsys, monkeypatch, "train", phased, "--plan", tmp_path / "plan.json")
    assert "a checkpoint of no phase" in run(
        capsys, monkeypatch, "train", phased, "--resume", tmp_path / "step-00000001"
    )
