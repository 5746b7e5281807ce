"""Where a run starts: how many steps it has, and its Progress before the first one."""

from __future__ import annotations

from motet.core.cluster import Device
from motet.core.errors import JointUserError
from motet.core.words import counted_words
from motet.data.examples import Examples
from motet.data.groups import GroupedOrder
from motet.data.order import EpochOrder, ExampleOrder
from motet.data.splits import OwnSplits
from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import TrainStep
from motet.train.checkpoint.choice import Say
from motet.train.checkpoint.contents import Progress
from motet.train.checkpoint.same_run import own_files, stated
from motet.train.optimizer import never_reached
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.run_config import RunConfig
from motet.train.world import World


def in_steps(recipe: Recipe, dataset: Examples | OwnSplits, order: EpochOrder, world: World, say: Say) -> Recipe:
    """The recipe with steps in place of epochs; it is said if there are too few. A collective."""
    with world.together():
        run = recipe.run.over(order)
    if recipe.run.epochs is not None:
        times = "once" if recipe.run.epochs == 1 else f"{recipe.run.epochs:g} times"
        times = f"at least {times}" if recipe.data.weights else times
        examples = counted_words(dataset.num_examples, "example")
        say(f"Each of the {examples} is taken {times}, in {counted_words(run.num_steps, 'step')}.")
    if short := never_reached(recipe.optimizer, run.num_steps):
        say(short)
    return recipe.model_copy(update={"run": run})


def slow_precision_words(recipe: Recipe, device: Device | None) -> str:
    """What of its device's peak a recipe in float32 cannot reach, as a sentence; "" for none, and where it was chosen.

    device: of the catalogue; None for one that is not in it.
    """
    is_stated = "dtype" in recipe.run.model_fields_set or "param_dtype" in recipe.fsdp.model_fields_set
    peaks = {} if device is None else device.peak_flops
    if is_stated or recipe.plan_precision != "fp32" or peaks.get("bf16", 0.0) <= peaks.get("fp32", 0.0):
        return ""
    times = f"{peaks['bf16'] / peaks['fp32']:.3g} times"
    return (
        f"Modules compute in float32, the default; this device's peak in bfloat16 is {times} as high. For that, set "
        'fsdp.param_dtype = "bfloat16" and fsdp.reduce_dtype = "float32": weights, their sums of gradients and the '
        'optimizer\'s state stay in float32. run.dtype = "float32" chooses float32 without this sentence.'
    )


def check_steps_of_epochs(run: RunConfig, progress: Progress, order: EpochOrder) -> None:
    """Raise JointUserError where epochs would be counted wrong, as the steps so far had other batches. On all ranks."""
    if run.epochs is not None and order.taken_before(progress.position) != progress.step * run.batch_size:
        raise JointUserError(
            f"The run is behind {counted_words(progress.position, 'example')} after "
            f"{counted_words(progress.step, 'step')}, so run.batch_size was not {run.batch_size} as now, by which "
            f"run.epochs = {run.epochs:g} is counted in steps: set it back, or state run.steps in place of run.epochs."
        )


def first_progress(
    recipe: Recipe, dataset: Examples | OwnSplits, order: ExampleOrder, step: TrainStep | PlannedStep
) -> Progress:
    """The Progress before the first step, with all that the order of examples depends on."""
    caps = order.caps if isinstance(order, GroupedOrder) else None
    beside = recipe.modules.beside_adapters(recipe.run.seed)
    return Progress(
        0,
        0,
        0,
        recipe.data.seed,
        dataset.fingerprint,
        group=caps,
        mixture=recipe.data.weights,
        beside=beside,
        scales=recipe.modules.adapter_scales,
        loss_scale=step.loss_scale and step.loss_scale.value,
        shuffle=recipe.data.shuffle,
        optimizer=recipe.optimizer.name,
        stated=stated(recipe),
        own_files=own_files(recipe),
    )


def restore_scale(step: TrainStep | PlannedStep, progress: Progress) -> None:
    """Go on with the loss scale of a checkpoint; one that computed in another type has none."""
    if step.loss_scale is not None and progress.loss_scale is not None:
        step.loss_scale.value, step.loss_scale.num_finite = progress.loss_scale, progress.num_finite
