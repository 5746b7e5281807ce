"""`[run]` of a recipe: folder, length, seed and device of a run."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from motet.core.errors import UserError
from motet.core.limits import MAX_EXAMPLES, MAX_SEED, MAX_STEPS, MAX_WAIT_S
from motet.core.words import counted_words
from motet.data.order import EpochOrder
from motet.train.recipe.phases import TrainingPhase

Service = Literal["tensorboard", "wandb", "trackio"]


class RunConfig(BaseModel):
    """`[run]` of a recipe: folder, length, seed and device."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    dir: Path = Field(description="folder for metrics, checkpoints and the report")
    steps: int | None = Field(
        None, gt=0, le=MAX_STEPS, description="optimizer steps of the whole run; it, or epochs, must be given"
    )
    epochs: float | None = Field(
        None,
        gt=0,
        le=MAX_STEPS,
        description="in place of steps: how often the run takes each example of data.train, with data.mixture at "
        "least; 0.5 takes half of them",
    )
    batch_size: int = Field(
        gt=0,
        le=MAX_EXAMPLES,
        description="examples of a step, over all ranks and microbatches; with data.group, groups of examples",
    )
    microbatches: int = Field(
        1,
        gt=0,
        le=MAX_EXAMPLES,
        description="parts of a batch whose gradients are accumulated; data.group sets it to the groups of a rank",
    )
    seed: int = Field(0, ge=0, le=MAX_SEED, description="of weights and dropout; data.seed orders the examples")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: GPUs if there are any")
    dtype: Literal["float32", "float64"] = Field("float32", description="of parameters and optimizer state")
    plan: Path | None = Field(None, description="a plan of `motet plan` to train under; --plan outweighs it")
    start: str | None = Field(
        None,
        min_length=1,
        description="a checkpoint whose weights the run begins with, a folder or a URL, or the folder of a run, which "
        "stands for the checkpoint of its last step; its optimizer and its position are not taken",
    )
    phase: tuple[TrainingPhase, ...] = Field(
        (), description="training phases, one after the other: [[run.phase]]; run.steps is theirs then"
    )
    on_bad_step: Literal["stop", "skip"] = Field(
        "stop", description="what is done about a step whose loss or gradient is not finite; it changes no weight"
    )
    report_to: tuple[Service, ...] = Field(
        ("tensorboard",), description="what scalars are reported to beside metrics.jsonl: one, or a list; [] is nothing"
    )
    compile: bool = Field(
        False,
        description="compile each block by torch.compile, for all lengths at once; without dropout, experts and "
        "generators, and under plans without tp, cp and zero-bubble schedules",
    )
    profile_steps: tuple[int, ...] = Field(
        (), description="steps, from 1, of which each rank writes a trace of torch's profiler to run.dir/profile"
    )
    wait_limit_s: float = Field(
        600.0,
        gt=0,
        le=MAX_WAIT_S,
        description="how long a rank waits for another that is alive; one whose process is gone ends the run at once",
    )

    @field_validator("report_to", mode="before", json_schema_input_type=Service | tuple[Service, ...])
    @classmethod
    def _one_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else tuple(given) if isinstance(given, list) else given

    @field_validator("report_to")
    @classmethod
    def _each_once(cls, given: tuple[Service, ...]) -> tuple[Service, ...]:
        if twice := next((name for name in given if given.count(name) > 1), ""):
            raise ValueError(f"it names {twice!r} twice; name each service once")
        return given

    @model_validator(mode="after")
    def _whole_microbatches(self) -> RunConfig:
        if self.batch_size % self.microbatches:
            raise ValueError(f"microbatches = {self.microbatches} must divide batch_size = {self.batch_size}")
        return self

    @field_validator("profile_steps", mode="before", json_schema_input_type=int | tuple[int, ...])
    @classmethod
    def _one_step_or_several(cls, given: Any) -> Any:
        return (given,) if isinstance(given, int) else tuple(given) if isinstance(given, list) else given

    @model_validator(mode="after")
    def _has_an_end(self) -> RunConfig:
        if self.steps is None and self.epochs is None:
            raise ValueError("it has neither steps nor epochs; give steps, the optimizer steps of the whole run")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps = {self.steps} and epochs = {self.epochs:g} both say how long it runs; remove one")
        return self

    @model_validator(mode="after")
    def _profiles_what_runs(self) -> RunConfig:
        if why := self._never_profiled():
            raise ValueError(why)
        return self

    @property
    def num_steps(self) -> int:
        """The steps of the run. Epochs are steps once the examples are known (`over`)."""
        assert self.steps is not None, "epochs of unknown length"
        return self.steps

    @property
    def length(self) -> str:
        """How long the run is, in words."""
        if self.epochs is None:
            return counted_words(self.num_steps, "step")
        return f"{self.epochs:g} epoch{'' if self.epochs == 1 else 's'}"

    def over(self, order: EpochOrder) -> RunConfig:
        """The same with `steps` in place of `epochs`. order: of the examples.

        The last step is whole: it takes what it lacks from the next epoch.
        Raises UserError for more steps than a run may have, and for a step of profile_steps that does not come.
        """
        if self.epochs is None:
            return self
        steps = -(-order.taken_in(Fraction(str(self.epochs))) // self.batch_size)
        if steps > MAX_STEPS:
            raise UserError(f"run.epochs = {self.epochs:g} are {steps:,} steps; a run may have {MAX_STEPS:,}.")
        over = self.model_copy(update={"steps": steps, "epochs": None})
        if why := over._never_profiled():
            raise UserError(f"run.epochs = {self.epochs:g} are {counted_words(steps, 'step')}, and {why}.")
        return over

    def _never_profiled(self) -> str:
        """A step of profile_steps that does not come, in words; "" if there is none, as far as is known."""
        last = math.inf if self.steps is None else self.steps
        wrong = [step for step in self.profile_steps if not 1 <= step <= last]
        return f"profile_steps has {wrong[0]}, and the steps are 1 to {self.steps or 'the last'}" if wrong else ""
