"""A run, from its recipe to its report: the entry point of `motet train`, and the loop over steps."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from motet.core.errors import JointUserError, Stopped, complete_origin, originating
from motet.core.files import write_whole
from motet.core.plan_file import plan_digest
from motet.core.timeline import Span, Timeline
from motet.dispatch import RankBatch
from motet.dropout import step_seed
from motet.models.compiling import uncompiled
from motet.runtime.planned_step import PlannedStep
from motet.runtime.step import StepResult
from motet.schedule.plan_units import recomputed_in
from motet.simulate.show.page import write_timeline_html
from motet.train.bad_step import BadSteps, BrokenWeights, Cause, examine
from motet.train.balancing import compute_dtype
from motet.train.changing_buffers import Buffers
from motet.train.checkpoint.choice import Say
from motet.train.checkpoint.contents import CHECKPOINTS, name_of
from motet.train.checkpoint.resuming import phase_has_ended
from motet.train.device import catalogued
from motet.train.evaluate import Evaluation
from motet.train.export import EXPORT, export
from motet.train.input.feed import Feed, StepInput, StepRange
from motet.train.input.loading import UnreadableExample
from motet.train.job import TrainingJob, build_job
from motet.train.made_items import write_items
from motet.train.optimizer import learning_rate, set_learning_rate
from motet.train.planned_job import ChosenPlan
from motet.train.predicting import PredictedRun
from motet.train.profiled_steps import profiled
from motet.train.recipe.recipe import Recipe
from motet.train.recipe.recipe_file import dump_recipe
from motet.train.recipe.whole import WholeRecipe
from motet.train.recompute_measured import RankCorrection, correction_words
from motet.train.report.beside import LAST_STEP
from motet.train.report.metrics import (
    DecodingSoFar,
    MeasuredStep,
    StepEnd,
    balance_metrics,
    cut_items,
    exchange_metrics,
    gather_measured,
    phase_metrics,
    prediction_metrics,
    step_metrics,
    utilisation_metrics,
)
from motet.train.report.metrics_log import MetricsLog, Terminal
from motet.train.report.page import write_report
from motet.train.report.peak import peak_of
from motet.train.report.rank_time import RankTime
from motet.train.report.step_lines import heldout_steps, to_json
from motet.train.report.summary import summarise, summary_lines
from motet.train.run_folder import RunFolder, locked_run_folder, writing
from motet.train.run_start import slow_precision_words
from motet.train.same_recipe import check_same_recipe
from motet.train.stop import StopSignal
from motet.train.world import StartedRanks, World, join_world, stay_away

_GO_ON, _STOP, _CANNOT_LOG = range(3)
"""What a rank requests at the end of a step; all ranks do the largest request of any."""
_MEMORY_ADVICE = (
    'Raise run.microbatches, set fsdp.recompute = "auto" or fsdp.param_dtype = "bfloat16", lower run.batch_size, the '
    "caps of data.group or data.max_sequence_length, or take more ranks."
)


@dataclasses.dataclass(frozen=True)
class PhaseOfRun:
    """Which training phase a run is. number: from 1, of `count`. later: the folders of the runs of those behind it."""

    name: str
    number: int
    count: int
    later: tuple[Path, ...] = ()


def train(
    recipe: Recipe,
    *,
    resume: str = "auto",
    trace: bool = False,
    chosen: ChosenPlan | None = None,
    plan: Callable[[World, Say], tuple[Recipe, ChosenPlan]] | None = None,
    phase: PhaseOfRun | None = None,
) -> None:
    """Train as a recipe says, on this rank together with all others. All files are written to `recipe.run.dir`.

    resume: "auto", "never", or the path of a checkpoint. trace: write trace.json, timeline.json and timeline.html.
    chosen: as of `build_job`. plan: plans first, as a collective; it is given a function that prints a sentence.
    phase: said at its beginning; with `resume` "auto", one that has ended and is not the last is passed over.
    Raises UserError if the input is wrong, and Stopped, a SystemExit(128 + signal), after a signal to stop.
    """
    start_s = time.perf_counter()
    started = StartedRanks.at_hand()
    in_phase = phase is not None
    used = None if chosen is None else chosen.used(started, in_phase=in_phase)
    if used is not None and started.rank not in used:
        if in_phase:  # Other phases may use this rank.
            stay_away(recipe.run.wait_limit_s)
        return
    with (
        originating(folder=recipe.run.dir, memory_advice=_MEMORY_ADVICE),
        join_world(recipe.run.device, wait_limit_s=recipe.run.wait_limit_s, used=used, in_phase=in_phase) as world,
        ExitStack() as cleanup,
    ):
        say = _say_plainly if world.is_first else _say_nothing
        if used is not None:
            others = "wait for the end of the phase" if in_phase else "have ended"
            say(f"The plan uses {len(used):,} of {started.num_ranks:,} ranks; the others {others}.")
        folder = None
        with world.together():
            if world.is_first:
                folder = cleanup.enter_context(locked_run_folder(recipe.run.dir, say))
        check_same_recipe(recipe, world)
        if phase is not None:
            name = f"Phase {phase.name} ({phase.number} of {phase.count})"
            if phase.later and resume == "auto" and phase_has_ended(recipe, phase.later, world, say):
                say(f"{name} has ended, with {f'step {recipe.run.steps}' if recipe.run.steps else recipe.run.length}.")
                return
            say(f"{name}: {recipe.run.length}, in {recipe.run.dir}.")
        if plan is not None:
            recipe, chosen = plan(world, say)
        if slow := slow_precision_words(recipe, catalogued(world.device)):
            say(slow)
        job = build_job(recipe, world, resume, say, cleanup, chosen)
        predicted = None if chosen is None else cleanup.enter_context(PredictedRun(recipe, chosen, world, say))
        _Run(job, trace, start_s, predicted, folder, resume).run()


class _Run:
    """The loop over steps, and what comes after it. Rank 0 writes the log; all ranks do all else alike."""

    def __init__(
        self,
        job: TrainingJob,
        trace: bool,
        start_s: float,
        predicted: PredictedRun | None,
        folder: RunFolder | None,
        resume: str,
    ) -> None:
        """predicted: None without a Plan. folder: on rank 0. resume: as of `train`."""
        self.predicted, self.folder = predicted, folder
        self.goes_on = "the same command" if resume == "auto" else f"the same command without --resume {resume}"
        self.job, self.recipe, self.world = job, job.recipe, job.world
        self.start_s, self.first_step = start_s, job.progress.step
        self.stop, self.buffers = StopSignal(), Buffers(job.model)
        self.log: MetricsLog | None = None
        self.bad_steps = BadSteps(self.recipe, job.dataset, self.world)
        self.spans: list[Span] | None = [] if trace else None
        self.evaluations: dict[int, Evaluation] = {}
        self.has_warned = False
        self.write_profile: Callable[[], None] = _do_nothing
        self.spec, self.plan_hash = job.spec, None if job.plan is None else plan_digest(job.plan)
        self.recomputed = (
            self.recipe.fsdp.recomputed(self.spec.num_blocks) if job.plan is None else recomputed_in(job.plan)
        )
        self.peak = peak_of(self.world.device, compute_dtype(self.recipe))
        self.peak_flops_per_s = sum(self.world.gather(self.peak.flops_per_s))

    def run(self) -> None:
        """Train to the last step, evaluate, export and report. A collective."""
        with self._saying_what_is_saved(), ExitStack() as opened:
            with self._on_first_rank():
                if self.world.is_first:
                    run, config = self.recipe.run, self.recipe.model_dump(mode="json")
                    log = MetricsLog(run.dir, self.first_step, run.num_steps, run.report_to, config)
                    self.log = opened.enter_context(log)
                    # Only now: a recipe that is refused must not replace the recipe of an earlier run.
                    write_whole(self.recipe.run.dir / "recipe.toml", dump_recipe(self.recipe).encode())
            # Outside of this block a signal ends the process at once: the last checkpoint has all steps by then.
            with self.stop:
                with self._losing_nothing():
                    self._train()
                self.job.checkpointer.wait()
                if request := max(self.world.gather(self._request())):
                    with self._losing_nothing():
                        self._leave(request)
            if self.job.progress.step not in self.evaluations and not self._evaluate():
                self._leave(_STOP)
            with self._on_first_rank():
                if self.log is not None:
                    self.log.check()
        if self.recipe.export.at_end:
            folder = self.recipe.run.dir / EXPORT
            in_parts = isinstance(self.job.step, PlannedStep) or self.job.mesh.is_divided
            with writing(folder):
                export(self.job.model, self.recipe, folder, self.world, self.job.progress, in_parts=in_parts)
        self._write_trace()
        self._write_last_step()
        with self._on_first_rank():
            if self.world.is_first:
                self._write_summary()

    @contextmanager
    def _on_first_rank(self) -> Iterator[None]:
        """Work of rank 0 in the run's folder: if a file cannot be written, all ranks raise UserError. A collective."""
        with self.world.together(), writing(self.recipe.run.dir):
            yield

    @contextmanager
    def _saying_what_is_saved(self) -> Iterator[None]:
        """Note the newest checkpoint on an exception with which this rank ends alone; others may wait for it."""
        try:
            yield
        except BaseException as error:
            with suppress(OSError):  # Of a folder out of reach, which must not hide the error.
                newest = self.job.checkpointer.newest
                saved = f"The newest checkpoint is {newest}." if newest else "There is no checkpoint."
                complete_origin(error, saved=saved)
            raise

    @contextmanager
    def _losing_nothing(self) -> Iterator[None]:
        """Save a checkpoint if the block raises JointUserError, which is then raised again. A collective."""
        try:
            yield
        except BrokenWeights:
            raise
        except JointUserError as error:
            if (saved := self._saved()) == str(error):
                raise  # A checkpoint that cannot be written, nor now.
            raise JointUserError(f"{str(error).rstrip('.')}; {saved}") from error

    def _train(self) -> None:
        """Take all steps that are left, with the checkpoints and evaluations that are due."""
        recipe = self.recipe
        self.job.model.train()
        if self._owes_evaluation() and not self._evaluate():
            self._leave(_STOP)
        with self._open_feed() as feed:
            ended = StepEnd.now()
            for step in range(self.first_step, recipe.run.num_steps):
                with originating(action=f"step {step + 1}"):
                    ended = self._take(step, feed, ended)

    def _take(self, step: int, feed: Feed, ended: StepEnd) -> StepEnd:
        """Take a step, and what is due behind it. ended: when the one before did. Returns when it did. A collective."""
        recipe = self.recipe
        asked_s = time.perf_counter()
        fed = feed.next_step()
        waited_s = time.perf_counter() - asked_s
        fed = self._corrected(fed)
        lacking_bytes = self.job.recomputation.lacking_bytes(fed.batches)
        result, cause = self._step(step, fed)
        if step == self.first_step:
            self.buffers.check(self.world)
        now = StepEnd.now()
        measured = MeasuredStep(
            now.time_s - ended.time_s,
            waited_s,
            fed.decide_s,
            now.core_wait_s - ended.core_wait_s,
            result.seconds_by_action,
            self.job.recomputation.metrics(fed.batches),
            RankTime.of(result),
            DecodingSoFar.of(feed.ahead, self.job.decoder),
            lacking_bytes,
        )
        request = self._record(result, cause, fed, measured)
        done = step + 1
        self.job.progress = dataclasses.replace(
            self.job.progress,
            step=done,
            position=fed.position,
            num_bad=fed.num_bad,
            num_skipped=self.job.progress.num_skipped + (not result.is_finite),
            loss_scale=self.job.step.loss_scale and self.job.step.loss_scale.value,
            num_finite=self.job.step.loss_scale.num_finite if self.job.step.loss_scale else 0,
        )
        self.write_profile()
        if request:
            self._leave(request)
        if done == recipe.run.num_steps or _is_due(done, recipe.checkpoint.every_steps):
            self._save()
        if _is_due(done, recipe.evaluate.every_steps):
            if not self._evaluate():
                self._leave(_STOP)
            return StepEnd.now()
        return now

    def _save(self) -> None:
        """Start to save a checkpoint of the steps done. A collective."""
        self.buffers.check(self.world)  # Not all modules have input in the first step.
        if self.log is not None:
            self.log.begin_checkpoint()
        self.job.checkpointer.save(self.job.model, self.job.optimizer, self.job.progress)

    def _open_feed(self) -> Feed:
        recipe, progress = self.recipe, self.job.progress
        steps = StepRange(
            progress.step,
            recipe.run.num_steps,
            recipe.run.batch_size,
            self.job.num_microbatches,
            progress.position,
            progress.num_bad,
        )
        return Feed(
            self.job.order,
            self.job.loading,
            self.job.mesh.host_everyone,
            steps,
            recipe.data,
            prepare=self._prepared,
            report=self._report,
        )

    def _prepared(self, batch: RankBatch) -> RankBatch:
        """As of `TrainingJob`, with what is recomputed."""
        return self.job.prepared(self.job.recomputation.of_rank(batch, self.job.mesh.rank))

    def _corrected(self, fed: StepInput) -> StepInput:
        """The input, with what is recomputed decided by the newest correction: some was prefetched before it."""
        recomputation, rank = self.job.recomputation, self.job.mesh.rank
        return dataclasses.replace(fed, batches=[recomputation.corrected(batch, rank) for batch in fed.batches])

    @contextmanager
    def _correcting(self, fed: StepInput) -> Iterator[None]:
        """Correct predicted bytes by those of the step in the block, if it is one of the first. A collective then."""
        correction = self.job.recomputation.correction
        if correction is None or not correction.is_measuring:
            yield
            return
        correction.begin_step()
        yield
        correction.end_step(max(batch.predicted_bytes for batch in fed.batches))
        if not correction.is_measuring:
            of_ranks = self.world.gather(RankCorrection(correction.largest, correction.limit_bytes))
            capacity_bytes, resolution_bytes = correction.capacity_bytes, correction.resolution_bytes
            self._say(correction_words(of_ranks, self.first_step, capacity_bytes, resolution_bytes))

    def _step(self, step: int, fed: StepInput) -> tuple[StepResult, Cause | None]:
        """Take a step; with the cause if it is bad, and no overflow that a smaller loss scale mends. A collective."""
        set_learning_rate(self.job.optimizer, learning_rate(self.recipe.optimizer, step, self.recipe.run.num_steps))
        self._seed(step)
        batches = [batch.to(self.world.device, non_blocking=True) for batch in self.job.drawn(step, fed)]
        if self.predicted is not None:
            self.predicted.start(fed)
        run, clock = self.recipe.run, self.job.step.clock
        profiling = profiled(run.dir, run.profile_steps, step + 1, clock, self.world)
        with self._correcting(fed), profiling as self.write_profile:
            result = self.job.step.run(batches, step)
        scale = self.job.step.loss_scale
        if result.is_finite:
            self.bad_steps.passed()
            if scale is not None:
                scale.passed()
            return result, None
        if scale is not None and scale.can_fall and result.has_overflowed:
            before, _ = scale.value, scale.overflowed()
            self._say(
                f"Step {step + 1}: gradients overflow float16 at a loss scale of {before:,.0f}, so it changes nothing; "
                f"the scale is {scale.value:,.0f} now."
            )
            return result, None
        self._seed(step)
        with uncompiled(self.recipe.run.compile):
            cause = examine(self.job.step, batches, fed, self.job.dataset, self.world)
        self._say(self.bad_steps.met(result, fed, cause))
        return result, cause

    def _seed(self, step: int) -> None:
        """Seed torch from (run.seed, step, rank), so that a resumed run needs no generator state.

        It draws what is not keyed by item: noise of a user's own modules. Ranks that share products draw alike, as all
        of them compute what is around the products, and so do copies of an encoder on stages.
        """
        torch.manual_seed(step_seed(self.recipe.run.seed, step, self.job.noise_rank(self.world.rank)))

    def _saved(self) -> str:
        """Save a checkpoint of the steps done; returns the end of a sentence about it. A collective."""
        done = self.job.progress.step
        if done == 0:
            return "no step has been trained."
        if any(self.world.gather(self._loss())):
            return "nothing is saved."
        try:
            if done > self.first_step:
                self._save()
                self.job.checkpointer.wait()
        except JointUserError as error:
            return str(error)
        return f"step {done} is saved, and {self.goes_on} goes on from it."

    def _loss(self) -> str:
        """How the run has lost its folder, as rank 0 sees it; else ""."""
        return "" if self.folder is None else self.folder.loss

    def _request(self) -> int:
        """What this rank requests at the end of a step."""
        if self._loss() or (self.log is not None and self.log.failure):
            return _CANNOT_LOG
        return _STOP if self.stop.received else _GO_ON

    def _record(self, result: StepResult, cause: Cause | None, fed: StepInput, measured: MeasuredStep) -> int:
        """Log a step; returns the largest request of any rank. A collective."""
        joined, request = gather_measured(measured, self.world, self._request())
        if (lacking_bytes := joined["memory"]["lacking_bytes"]) and not self.has_warned:
            self.has_warned = True
            self._say(self.job.recomputation.lacking_words(result.step + 1, lacking_bytes))
        if self.spans is not None:
            self.spans += result.timeline
        prediction, gained_s = None, None
        if self.predicted is not None:
            prediction, gained_s = self.predicted.of(result, joined, self._say)
        if self.log is not None:
            tokens_per_s = result.num_tokens / joined["step_s"]
            self.log.write(
                {
                    "step": result.step + 1,
                    "loss": result.loss if result.has_loss else None,
                    "losses": result.losses,
                    "grad_norm": result.grad_norm,
                    "lr": learning_rate(self.recipe.optimizer, result.step, self.recipe.run.num_steps),
                    "position": fed.position,
                    "plan": self.plan_hash,
                    "bad_step": None if cause is None else str(cause),
                    "loss_scale": result.loss_scale,
                    "overflow": cause is None and not result.is_finite,
                    "num_examples": result.num_examples,
                    "num_targets": result.num_targets,
                    "num_tokens": result.num_tokens,
                    "tokens_per_s": round(tokens_per_s, 1),
                    "tokens_per_s_per_rank": round(tokens_per_s / self.world.num_ranks, 1),
                    **utilisation_metrics(
                        self.spec,
                        fed.batches,
                        self.recomputed,
                        joined["step_s"],
                        self.peak_flops_per_s,
                        in_stages=isinstance(self.job.step, PlannedStep),
                    ),
                    **joined,
                    **prediction_metrics(prediction),
                    "bytes": result.sent_bytes,
                    "exchange": exchange_metrics(joined["actions"], result, fed),
                    "balance": balance_metrics(fed.batches, gained_s),
                    "cuts": cut_items(fed.batches, gained_s),
                    "defer": step_metrics(fed.decided),
                    "phases": phase_metrics(self.spec, fed.batches),
                    "bad_examples": fed.num_bad + self.job.dataset.left_out.num_bad,
                    "left_out": [{"file": bad.file, "line": bad.where, "why": bad.reason} for bad in fed.left_out],
                }
            )
        return request

    def _owes_evaluation(self) -> bool:
        """Whether it goes on behind a step that was to be evaluated, and was not: a signal came before the end of that.

        The last step is evaluated in any case. A collective.
        """
        is_due = _is_due(self.first_step, self.recipe.evaluate.every_steps)
        if self.job.evaluator is None or not is_due or self.first_step in (0, self.recipe.run.num_steps):
            return False
        with self._on_first_rank():
            evaluated = heldout_steps(self.recipe.run.dir) if self.world.is_first else []
        return self.first_step not in self.world.gather(evaluated)[0]

    def _evaluate(self) -> bool:
        """Evaluate, if the recipe does; False if a signal to stop any rank ended it early. A collective."""
        if self.job.evaluator is None:
            return True
        with uncompiled(self.recipe.run.compile):
            evaluation = self.job.evaluator.run(self.job.model, is_stopped=lambda: bool(self.stop.received))
        if evaluation is None:
            return False
        self.evaluations[self.job.progress.step] = evaluation
        with self._on_first_rank():
            if self.log is not None:
                found = evaluation.loss, evaluation.exact_match, evaluation.losses_made
                self.log.write_heldout(self.job.progress.step, *found)
                answers = [dataclasses.asdict(answer) | {"is_exact": answer.is_exact} for answer in evaluation.samples]
                text = to_json(answers, ensure_ascii=False, indent=1)
                (self.recipe.run.dir / "answers.json").write_text(text, encoding="utf-8")
                write_items(self.recipe.run.dir, self.job.progress.step, evaluation.made, self.job.dataset.transforms)
        return True

    def _leave(self, request: int) -> None:
        """End the run early, as a rank requests. Raises JointUserError or Stopped."""
        if request == _CANNOT_LOG:
            failure = self.world.gather(self._loss() or (self.log.failure if self.log is not None else ""))[0]
            raise JointUserError(f"{failure}, so training stops.")
        number = max(self.world.gather(self.stop.received))
        self._say(f"Asked to stop: {self._saved()}")
        raise Stopped(128 + number)

    def _write_trace(self) -> None:
        """Write the spans of all ranks, two ways, and a page of the last step. A collective."""
        if self.spans is None:
            return
        if self.job.progress.step == self.first_step:
            self._say("No step was left to take, so what an earlier --trace wrote stays as it is.")
            return
        spans = [span for of_rank in self.world.gather(self.spans) for span in of_rank]
        with self._on_first_rank():
            if self.world.is_first:
                timeline = Timeline.of(spans)
                timeline.write_chrome_trace(self.recipe.run.dir / "trace.json")
                timeline.write_json(self.recipe.run.dir / "timeline.json")
                last = max((span.step for span in spans), default=0)
                write_timeline_html(
                    Timeline.of(span for span in spans if span.step == last),
                    self.recipe.run.dir / "timeline.html",
                    title=f"Step {last + 1}, measured",
                )

    def _write_last_step(self) -> None:
        """Write the last step under a Plan for the report. A collective."""
        with self._on_first_rank():
            if self.predicted is not None:
                self.predicted.write_last_step(self.recipe.run.dir)
            elif self.world.is_first:
                (self.recipe.run.dir / LAST_STEP).unlink(missing_ok=True)  # Of an earlier run here.

    def _write_summary(self) -> None:
        """Write summary.json and the report, and print the summary."""
        run_dir = self.recipe.run.dir
        wall_s = time.perf_counter() - self.start_s
        summary = summarise(run_dir, self.world, self.peak, wall_s, self.evaluations)
        (run_dir / "summary.json").write_text(to_json(summary, indent=1) + "\n", encoding="utf-8")
        report = write_report(run_dir)
        for line in summary_lines(summary):
            _say_plainly(line)
        _say_plainly(f"Report: {report}")
        if self.recipe.export.at_end:
            _say_plainly(f"Trained model: {run_dir / EXPORT}")
        elif isinstance(self.recipe, WholeRecipe):
            saved = run_dir / CHECKPOINTS / name_of(self.job.progress.step)
            _say_plainly(f"For transformers: motet export {shlex.quote(str(saved))} --out DIR")

    def _report(self, bad: UnreadableExample) -> None:
        self._say(f"Left out, on all ranks: {bad}")

    def _say(self, sentence: str) -> None:
        if self.log is not None:
            self.log.say(sentence)


def _is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _say_plainly(sentence: str) -> None:
    print(sentence, file=Terminal(), flush=True)


def _say_nothing(sentence: str) -> None:
    pass


def _do_nothing() -> None:
    pass
