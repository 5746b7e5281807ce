"""The command line: `motet train | checkpoints | export | plan | simulate | profile | analyze | recipe-schema | ...`.

Wrong input ends in one sentence on stderr and exit code 2; `crash.py` handles every other exception. A command imports
what it needs when it runs, so that `motet --help` answers at once.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import motet
from motet.core.errors import UserError
from motet.core.files import check_outputs
from motet.core.heap import keep_freed_memory
from motet.core.limits import MAX_BATCHES, MAX_EXAMPLES, MAX_NODES, MAX_RANKS, MAX_RANKS_PER_NODE, MAX_SEED
from motet.core.words import counted_words
from motet.crash import ended

if TYPE_CHECKING:
    from motet.train.recipe.recipe import Recipe
    from motet.train.trainer import PhaseOfRun

app = typer.Typer(
    name="motet",
    help="Train multimodal LLMs with every phase balanced over ranks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


(_UsageError,) = typer.BadParameter.__bases__
"""The base of all errors in a command line, which typer does not export and would print as a box of six lines."""

ClusterOption = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE",
        help="What a recipe is for: h100, a40 ...; default: what it says itself, else cpu, this machine.",
    ),
]
NodesOption = Annotated[int | None, typer.Option(min=1, max=MAX_NODES, help="Nodes of the cluster.")]
RanksPerNodeOption = Annotated[
    int | None, typer.Option(min=1, max=MAX_RANKS_PER_NODE, help="Devices of a node; default: as usual.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="TABLE.KEY=VALUE",
        help="Set a key of the recipe; repeatable. VALUE is TOML. ~TABLE.KEY removes a key.",
    ),
]


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"motet {motet.__version__}")
        raise typer.Exit


def _keep_what_planning_makes() -> None:
    """Planning makes many small objects that stay, and large arrays that do not. Collect garbage less often, and not
    over imported modules; keep freed memory. Called before imports, which make such objects too, and behind them."""
    keep_freed_memory()
    gc.freeze()
    gc.set_threshold(20_000)


def _check_readable(
    recipe: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    plans: Sequence[Path] = (),
    profile: Path | None = None,
) -> None:
    """Read files that a command will read, as what is wrong with them is said before what takes seconds to import.

    Raises UserError.
    """
    from motet.core.text_files import read_json

    for plan in plans:
        read_json(plan, "the plan")
    if profile is not None:
        read_json(profile, "the profile")
    if recipe is not None:
        from motet.train.recipe.reading import read_recipe

        read_recipe(recipe, overrides)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("train")
def train_recipe(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The training job.")],
    overrides: SetOption = None,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace",
            help="Write every action of every rank: trace.json for chrome://tracing, timeline.json, timeline.html.",
        ),
    ] = False,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|PATH",
            help="auto: go on from the run's newest whole checkpoint, if it has any; never: start anew and delete the "
            "run's checkpoints; PATH: go on from that checkpoint and delete none.",
        ),
    ] = "auto",
    plans: Annotated[
        list[Path] | None,
        typer.Option(
            "--plan",
            metavar="PLAN.json",
            help="Train under a plan that motet plan wrote; default: the recipe's run.plan. Of a recipe in phases: one "
            "for each, in their order.",
        ),
    ] = None,
    is_dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what each rank would hold at the most, and train nothing."),
    ] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Of --dry-run: write the prediction as JSON too; -: print it, and no tables."
        ),
    ] = None,
) -> None:
    """Train as a recipe says: alone, or as every rank of `torchrun ... -m motet train RECIPE.toml`."""
    if is_dry_run:
        if trace or resume != "auto":
            raise UserError("--dry-run trains nothing, so --trace and --resume mean nothing beside it.")
        plan = _one_plan(plans, recipe)
        check_outputs([json_file], [recipe, plan])
        _check_readable(recipe, overrides or (), plans=plans or ())
        from motet.planning.dry_run import show_memory

        show_memory(recipe, overrides or (), json_file, plan.absolute() if plan is not None else None)
        return
    if json_file is not None:
        raise UserError("--json is for --dry-run; a run writes metrics.jsonl and summary.json in its folder.")
    from motet.train.recipe.reading import of_phases, phase_names

    names = phase_names(recipe, overrides or ())
    if names and plans and len(plans) != len(names):
        raise UserError(
            f"{recipe} trains in phases ({', '.join(names)}), and a plan is of one: give --plan "
            f"{counted_words(len(names), 'time')}, in their order, choose a phase with --set run.phase={names[0]}, or "
            "state `plan` in each [[run.phase]]."
        )
    _check_readable(plans=plans or ())
    if not names:
        from motet.train.recipe.recipe_file import load_recipe

        _train(load_recipe(recipe, overrides or ()), recipe, overrides or (), resume, trace, _one_plan(plans, recipe))
        return
    phases = of_phases(overrides or (), names)
    _train_phases(recipe, phases, resume, trace, plans or ())


def _one_plan(plans: list[Path] | None, recipe: Path) -> Path | None:
    """The plan that is given, None if none is. Raises UserError for several."""
    if plans and len(plans) > 1:
        raise UserError(
            f"--plan is given {counted_words(len(plans), 'time')}, and {recipe} is one run here; give one plan."
        )
    return plans[0] if plans else None


def _train_phases(recipe: Path, phases: dict[str, list[str]], resume: str, trace: bool, plans: Sequence[Path]) -> None:
    """Train one phase after the other. phases: name -> the overrides that choose it, too. plans: of each, or none."""
    from motet.train.checkpoint.resuming import has_ended
    from motet.train.deferred_model import check_ahead
    from motet.train.recipe.recipe_file import load_recipe
    from motet.train.trainer import PhaseOfRun

    # What is wrong with a later phase is said before the first one trains.
    jobs = {name: load_recipe(recipe, overrides) for name, overrides in phases.items()}
    for name, job in list(jobs.items())[1:]:
        if not has_ended(job):
            try:
                check_ahead(job)
            except UserError as error:
                raise UserError(f"Phase {name}: {error}") from error
    for plan, (name, overrides) in zip(plans, phases.items()):
        from motet.planning.under_plan import recipe_under_plan

        recipe_under_plan(jobs[name], recipe, plan.absolute(), overrides)
    resumed, folders = None, [job.run.dir for job in jobs.values()]
    if resume not in ("auto", "never"):
        within = Path(resume).absolute()
        resumed = next((name for name, job in jobs.items() if within.is_relative_to(job.run.dir)), None)
        if resumed is None:
            raise UserError(
                f"--resume {resume} is a checkpoint of no phase: those are in {', '.join(map(str, folders))}."
            )
    for number, (name, overrides) in enumerate(phases.items()):
        if resumed is None or name == resumed:
            phase = PhaseOfRun(name, number + 1, len(phases), tuple(folders[number + 1 :]))
            plan = plans[number] if plans else None
            _train(jobs[name], recipe, overrides, resume, trace, plan, phase)
        if name == resumed:
            resume, resumed = "auto", None


def _train(
    job: Recipe,
    recipe: Path,
    overrides: Sequence[str],
    resume: str,
    trace: bool,
    plan: Path | None,
    phase: PhaseOfRun | None = None,
) -> None:
    """Train a recipe, or a phase of one that `overrides` choose. job: what was read of it."""
    from motet.train.trainer import train as run_training

    chosen, plan_anew = None, None
    if plan_file := plan.absolute() if plan is not None else job.run.plan:
        from motet.planning.under_plan import recipe_under_plan

        job, chosen = recipe_under_plan(job, recipe, plan_file, overrides)
    elif job.parallel:
        from motet.planning.plan_first import plan_first

        plan_anew = partial(plan_first, job, recipe, overrides)
    run_training(job, resume=resume, trace=trace, chosen=chosen, plan=plan_anew, phase=phase)


@app.command("checkpoints")
def list_checkpoints(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="The run.dir of a recipe, its checkpoint.url, or a checkpoint there.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the checkpoints of a run and verify every byte of them; nothing is changed."""
    from motet.train.checkpoint.command import show_checkpoints

    show_checkpoints(folder, as_json)


@app.command("export")
def export_model(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="One of a run: RUN_DIR/checkpoints/step-..., or its URL.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write into: empty, or not there.")],
    recipe: Annotated[
        Path | None,
        typer.Option(metavar="RECIPE.toml", help="The run's recipe; default: recipe.toml in the run's folder."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Write the model of a checkpoint as directories that transformers reads; nothing else is changed."""
    from motet.train.checkpoint.folder import check_checkpoint
    from motet.train.checkpoint.remote import is_stored

    if not is_stored(checkpoint):
        check_checkpoint(Path(checkpoint))
    from motet.train.export_checkpoint import export_checkpoint

    export_checkpoint(checkpoint, out, recipe, overrides or ())


@app.command("plan")
def plan_recipe(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The job: model, batch size, data.")],
    cluster: ClusterOption = None,
    nodes: NodesOption = None,
    ranks_per_node: RanksPerNodeOption = None,
    workload: Annotated[
        Path | None,
        typer.Option(
            help="Lengths of examples: a manifest, a CSV, a TOML of distributions, or a recipe; "
            "by default those of the recipe itself."
        ),
    ] = None,
    pins: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="KEY=VALUE", help="Decide something beforehand, e.g. tp=8; repeatable."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="JSON", help="Times that motet profile measured."),
    ] = None,
    is_trainable: Annotated[
        bool,
        typer.Option("--trainable", help="Find the fastest plan that motet train can run."),
    ] = False,
    measure: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            metavar="K",
            help="Run real steps of the fastest K plans that training can run, on this machine or, under torchrun, on "
            "all its ranks; the fastest measured is the best.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="JSON", help="The file for the best plan.")] = Path("plan.json"),
    png: Annotated[
        Path | None, typer.Option(metavar="OUT", help="A picture of its step; default: beside the plan.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a page of its step to zoom in.")] = None,
    explain: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Write a page of all plans that were simulated, side by side.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json",
            metavar="FILE",
            help="Write the figures of all plans that were simulated, best first; -: print it.",
        ),
    ] = None,
    what_if: Annotated[
        bool | None,
        typer.Option(
            "--what-if/--no-what-if",
            help="Plan anew with more memory, a node more and larger batches; default: if the job is small.",
        ),
    ] = None,
    launch: Annotated[
        str | None,
        typer.Option(
            metavar="slurm|k8s",
            help="Find as --trainable does, and write, beside the plan, the file that starts the job under it: a "
            "script for sbatch, or a Kubernetes job.",
        ),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Find the plan by which a job trains fastest, and whether it fits, before any GPU is hired."""
    _keep_what_planning_makes()
    from motet.planner.command import PlanOutputs
    from motet.planner.pins import parse_pins
    from motet.planner.strategies import STRATEGIES
    from motet.planning.best_plan import PlanRequest, plan_requested
    from motet.planning.cluster import ClusterOptions, with_device
    from motet.planning.job import JobOptions

    if launch not in (None, "slurm", "k8s"):
        raise UserError(f"--launch {launch}: must be slurm or k8s.")
    _check_readable(profile=profile)
    _keep_what_planning_makes()
    request = PlanRequest(
        recipe,
        tuple(with_device(recipe, overrides or (), cluster)),
        JobOptions(ClusterOptions(cluster, nodes, ranks_per_node), workload, profile),
        parse_pins(pins or (), STRATEGIES),
        PlanOutputs(out, png or out.with_suffix(".png"), html, explain, json_file),
        is_trainable=is_trainable,
        says_what_if=what_if,
        launch=launch,
        num_measured=measure,
    )
    plan_requested(request)


@app.command("simulate")
def simulate_plan(
    plan: Annotated[
        Path,
        typer.Argument(metavar="PLAN.json|RECIPE.toml", help="The placement of a job, or a job as it trains."),
    ],
    workload: Annotated[
        Path | None,
        typer.Option(
            help="Lengths of examples: a manifest, a CSV, a TOML of distributions, or a recipe; "
            "by default those of the recipe that is given, or that the plan names as its model."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="JSON", help="Times that motet profile measured, instead of estimates.")
    ] = None,
    cluster: ClusterOption = None,
    nodes: NodesOption = None,
    ranks_per_node: RanksPerNodeOption = None,
    overrides: SetOption = None,
    trace: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a trace for Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a page to zoom and pan in.")] = None,
    png: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a picture.")] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the figures as JSON; -: print it, and no tables."),
    ] = None,
    actions: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_RANKS,
            metavar="RANK",
            help="Print what a rank executes, action by action, instead of the tables.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, max=MAX_BATCHES, help="Batches drawn; the slowest is shown.")] = 1,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the batches drawn, and of the jitter.")] = 0,
    jitter: Annotated[
        float, typer.Option(min=0, max=2, help="Spread of the time of each computation, as a share of it: stragglers.")
    ] = 0.0,
) -> None:
    """Predict a step of a plan or a recipe before any GPU is hired: time, throughput, MFU, memory, bubbles."""
    _keep_what_planning_makes()
    from motet.planner.refinement import strategy_of
    from motet.planning.simulated import SimulatedJob
    from motet.planning.trainable import untrained
    from motet.simulate.command import PredictionOutputs, show_predictions
    from motet.simulate.predict.predict import predictions

    outputs = PredictionOutputs(trace, html, png, actions, json_file)
    outputs.check()
    check_outputs([trace, html, png, json_file], [plan, workload, profile])
    _check_readable(plan if plan.suffix == ".toml" else None, overrides or (), profile=profile)
    if plan.suffix == ".toml":
        from motet.planning.cluster import ClusterOptions, with_device
        from motet.planning.job import JobOptions

        options = JobOptions(ClusterOptions(cluster, nodes, ranks_per_node), workload, profile)
        job = SimulatedJob.of_recipe(plan, with_device(plan, overrides or (), cluster), options)
    elif any(option is not None for option in (cluster, nodes, ranks_per_node)):
        raise UserError(
            f"--cluster, --nodes and --ranks-per-node are for a recipe; {plan} is a plan, which says all that itself."
        )
    else:
        job = SimulatedJob.of_plan(plan, workload, profile, overrides or ())
    _keep_what_planning_makes()
    predicted = predictions(job.plan, job.lengths, job.cost, batches, seed=seed, jitter=jitter, **job.decided)
    about = {"title": f"{plan.stem}, predicted", "strategy": strategy_of(job.plan), "obstacle": untrained(job.plan)}
    show_predictions(job.plan, predicted, outputs, **about)


@app.command("analyze")
def analyze_data(
    source: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE.toml|MANIFEST|LENGTHS.csv",
            help="A training job, its data alone, or a table of lengths; the latter two by URL, too.",
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, max=MAX_RANKS, help="Ranks that the load is to be balanced over.")] = 8,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_EXAMPLES,
            help="Examples balanced together, over all ranks; default: a microbatch of the recipe, else 128.",
        ),
    ] = None,
    batches: Annotated[int, typer.Option(min=1, max=MAX_BATCHES, help="Batches drawn for the expected loads.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Seed of the batches drawn.")] = 0,
    mix: Annotated[
        str, typer.Option(help="rows: draw rows as they come; even: each kind of example equally often.")
    ] = "rows",
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Counts a manifest's text; without it, 4 bytes are a token.")
    ] = None,
    overrides: SetOption = None,
    html: Annotated[Path | None, typer.Option(metavar="OUT", help="Write a page with plots as well.")] = None,
) -> None:
    """Show how heterogeneous a dataset is, and what balancing each phase would gain, before any GPU is hired."""
    from motet.analyze import analyze_command

    if mix not in ("rows", "even"):
        raise UserError(f"--mix {mix}: must be rows or even.")
    check_outputs([html], [source])
    subject: Any = source
    examples = 128
    if source.endswith(".toml"):
        _check_readable(Path(source), overrides or ())
        from motet.planning.analyze_recipe import read_subject

        if tokenizer is not None:
            raise UserError(f"--tokenizer is for a manifest; {source} names its own in data.tokenizer.")
        subject, examples = read_subject(Path(source), overrides or ())
    elif overrides:
        raise UserError(f"--set is for a recipe; {source} is none.")
    analyze_command(
        subject,
        num_ranks=ranks,
        batch_size=examples if batch_size is None else batch_size,
        num_batches=batches,
        seed=seed,
        mix=mix,
        tokenizer=tokenizer,
        html=html,
    )


@app.command("profile")
def profile_model(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE.toml", help="The training job.")],
    out: Annotated[
        Path | None, typer.Option(metavar="JSON", help="The file; default: profile.json in run.dir.")
    ] = None,
    overrides: SetOption = None,
    seconds: Annotated[
        float, typer.Option(min=1, max=86_400, help="Time to measure layers for; a few rounds in any case.")
    ] = 60,
) -> None:
    """Time each kind of layer of a recipe's model on this device, alone or as every rank under torchrun."""
    check_outputs([out], [recipe])
    _check_readable(recipe, overrides or ())
    from motet.profiling.command import profile as run_profile
    from motet.train.recipe.recipe_file import load_recipe

    run_profile(load_recipe(recipe, overrides or ()), recipe.stem, out=out, seconds=seconds)


@app.command("recipe-schema")
def print_recipe_schema() -> None:
    """Print a JSON Schema of recipes, which describes every key: for editors, and to look keys up."""
    import json

    from motet.train.recipe.schema import recipe_schema

    print(json.dumps(recipe_schema(), indent=2))


@app.command("demo-data")
def demo_data(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write into; it is created.")],
    num_train: Annotated[int, typer.Option(min=1, max=MAX_EXAMPLES, help="Training examples.")] = 16000,
    num_heldout: Annotated[
        int, typer.Option(min=1, max=MAX_EXAMPLES, help="Held-out examples, of unseen images and voices.")
    ] = 400,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="The same seed writes the same bytes.")] = 0,
) -> None:
    """Write a small dataset of PNG images, WAV speech and text, with its manifests."""
    from rich.progress import Progress

    try:
        from motet.demo import write_demo_data
    except ImportError as error:
        raise UserError(
            f"motet demo-data needs the package '{error.name}', which is not installed: pip install 'motet[demo]'."
        ) from error
    with Progress(transient=True) as bars:
        tasks: dict[str, int] = {}

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done)  # type: ignore[arg-type]

        write_demo_data(out, num_train=num_train, num_heldout=num_heldout, seed=seed, progress=show)
    print(f"Wrote {num_train} training and {num_heldout} held-out examples to {out}.")


def _check_arguments() -> None:
    """Raise UserError for an argument that is empty or not UTF-8.

    An empty argument comes from a shell variable that is not set, and as a path would name this folder. Bytes that are
    not UTF-8 would fail later, where they are first written to a file or a message.
    """
    for index, argument in enumerate(sys.argv[1:], start=1):
        if not argument:
            before = repr(sys.argv[index - 1]) if index > 1 else "motet"
            raise UserError(f"motet: the argument after {before} is empty; give it a value, or leave it out.")
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise UserError(f"The argument {argument!a} is not UTF-8; name it by whole characters.") from None


def _run() -> None:
    """Run the command of the command line. Raises UserError if the command line is wrong."""
    try:
        # typer returns an exit code if a command ends early, as --help does.
        code = app(sys.argv[1:] or ["--help"], prog_name="motet", standalone_mode=False)
    except _UsageError as error:
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "motet"
        problem = " ".join(error.format_message().split()).rstrip(".").replace(": Input should be", ": must be")
        problem = f"{problem[:1].lower()}{problem[1:]}".replace(". Did you mean", "; did you mean")
        hint = "" if problem.endswith("?") else f"; see `{command} --help`."
        raise UserError(f"{command}: {problem}{hint}") from None
    if isinstance(code, int):
        raise SystemExit(code)


def main() -> None:
    """Run the command line. `motet/crash.py` lists the exit codes and turns exceptions into sentences."""
    command = next((argument for argument in sys.argv[1:2] if not argument.startswith("-")), "")
    with ended(f"motet {command}".strip()):
        _check_arguments()
        _run()


if __name__ == "__main__":
    main()
