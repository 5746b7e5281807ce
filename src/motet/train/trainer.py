"""A run from its recipe to its report: the one function that the command line calls, and the loop over steps."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from contextlib import ExitStack

import numpy as np
import torch

from motet.core.errors import UserError
from motet.core.timeline import Span, Timeline
from motet.cost.flops import mfu
from motet.dispatch import RankBatch
from motet.models.spec import model_spec
from motet.runtime.step import StepResult
from motet.simulate.page import write_html
from motet.train.evaluate import Evaluation
from motet.train.export import export
from motet.train.feed import Feed, Schedule, StepInput
from motet.train.job import Job, build_job
from motet.train.loading import BadExample
from motet.train.metrics import Measured, balance_metrics, gather_measured, phase_metrics
from motet.train.metrics_log import MetricsLog
from motet.train.optimizer import learning_rate, set_learning_rate
from motet.train.peak import peak_of
from motet.train.recipe import Recipe, dump_recipe
from motet.train.report import write_report
from motet.train.stop import StopSignal
from motet.train.summary import summarise, summary_lines
from motet.train.world import JointUserError, join_world


def train(recipe: Recipe, *, resume: str = "auto", trace: bool = False) -> None:
    """Run a recipe on this rank, together with all others; everything that it leaves is in `recipe.run.dir`.

    resume: "auto", "never", or the path of a checkpoint. trace: write trace.json and timeline.html.
    Raises UserError for what is wrong with the input, and SystemExit with 128 + signal if it was asked to stop.
    """
    start_s = time.perf_counter()
    with join_world(recipe.run.device) as world, ExitStack() as cleanup, StopSignal() as stop:
        with world.together():
            if world.is_first:
                _prepare_folder(recipe)
        job = build_job(recipe, world, resume, _say_plainly if world.is_first else _say_nothing, cleanup)
        _Run(job, stop, trace, start_s).run()


class _Run:
    """The loop over steps, and what comes after it. Rank 0 has the log; all ranks take every other step alike."""

    def __init__(self, job: Job, stop: StopSignal, trace: bool, start_s: float) -> None:
        self.job, self.recipe, self.world = job, job.recipe, job.world
        self.stop, self.start_s = stop, start_s
        self.spans: list[Span] | None = [] if trace else None
        self.evaluations: dict[int, Evaluation] = {}
        self.spec = model_spec(job.model)
        compute_dtype = self.recipe.fsdp.param_dtype or self.recipe.run.dtype
        self.peak = peak_of(self.world.device, getattr(torch, compute_dtype))
        self.peak_flops_per_s = sum(self.world.gather(self.peak.flops_per_s))

    def run(self) -> None:
        """Train to the last step, evaluate, export and report; a collective."""
        with ExitStack() as opened:
            self.log = (
                opened.enter_context(MetricsLog(self.recipe.run.dir, self.job.progress.step, self.recipe.run.steps))
                if self.world.is_first
                else None
            )
            self._train()
            if self.job.progress.step not in self.evaluations:
                self._evaluate()
        self.job.checkpointer.wait()
        if self.recipe.export.at_end:
            export(self.job.model, self.recipe.data.tokenizer, self.recipe.run.dir / "export", self.world)
        self._write_trace()
        if self.world.is_first:
            self._write_summary()
        self.world.barrier()

    def _train(self) -> None:
        recipe = self.recipe
        self.job.model.train()
        with self._open_feed() as feed:
            ended_s = time.perf_counter()
            for step in range(self.job.progress.step, recipe.run.steps):
                fed = feed.next_step()
                waited_s = time.perf_counter() - ended_s
                result = self._step(step, fed)
                now_s = time.perf_counter()
                measured = Measured(now_s - ended_s, waited_s, fed.decide_s, result.seconds_by_action)
                ended_s = now_s
                stopping = self._record(result, fed, measured)
                done = step + 1
                self.job.progress = dataclasses.replace(
                    self.job.progress, step=done, position=fed.position, num_bad=fed.num_bad
                )
                if stopping or done == recipe.run.steps or _is_due(done, recipe.checkpoint.every_steps):
                    self.job.checkpointer.save(self.job.model, self.job.optimizer, self.job.progress)
                if stopping:
                    self._leave_early()
                if _is_due(done, recipe.evaluate.every_steps):
                    self._evaluate()
                    ended_s = time.perf_counter()

    def _open_feed(self) -> Feed:
        recipe, progress = self.recipe, self.job.progress
        schedule = Schedule(
            progress.step,
            recipe.run.steps,
            recipe.run.batch_size,
            recipe.run.microbatches,
            progress.position,
            progress.num_bad,
        )
        pin = RankBatch.pin_memory if self.world.device.type == "cuda" else None
        return Feed(
            self.job.order,
            self.job.loading,
            self.job.mesh.host_group,
            schedule,
            recipe.data,
            prepare=pin,
            report=self._report,
        )

    def _step(self, step: int, fed: StepInput) -> StepResult:
        set_learning_rate(self.job.optimizer, learning_rate(self.recipe.optimizer, step, self.recipe.run.steps))
        # Nothing random is carried from step to step, so that a resumed run needs no generator's state.
        seed = np.random.SeedSequence((self.recipe.run.seed, step, self.world.rank)).generate_state(1, np.uint64)
        torch.manual_seed(int(seed[0]) >> 1)
        batches = [batch.to(self.world.device, non_blocking=True) for batch in fed.batches]
        result = self.job.step.run(batches, step)
        if not (math.isfinite(result.loss) and math.isfinite(result.grad_norm)):
            raise JointUserError(
                f"Step {step + 1} has a loss of {result.loss} and a gradient norm of {result.grad_norm}, so training "
                "stops; resume from the last checkpoint with a smaller optimizer.lr, a longer optimizer.warmup_steps, "
                "or a smaller optimizer.clip_norm."
            )
        return result

    def _record(self, result: StepResult, fed: StepInput, measured: Measured) -> bool:
        """Log the step; whether any rank was asked to stop."""
        joined, stopping = gather_measured(measured, self.world, bool(self.stop.received))
        if self.spans is not None:
            self.spans += result.timeline
        if self.log is not None:
            lengths = [batch.lengths for batch in fed.batches]
            tokens_per_s = result.num_tokens / joined["step_s"]
            self.log.write(
                {
                    "step": result.step + 1,
                    "loss": result.loss,
                    "grad_norm": result.grad_norm,
                    "lr": learning_rate(self.recipe.optimizer, result.step, self.recipe.run.steps),
                    "position": fed.position,
                    "num_examples": result.num_examples,
                    "num_targets": result.num_targets,
                    "num_tokens": result.num_tokens,
                    "tokens_per_s": round(tokens_per_s, 1),
                    "tokens_per_s_per_rank": round(tokens_per_s / self.world.num_ranks, 1),
                    "mfu": mfu(self.spec, lengths, joined["step_s"], self.peak_flops_per_s),
                    **joined,
                    "exchange": {
                        "seconds": sum(
                            s["max_s"] for name, s in joined["actions"].items() if name.startswith("exchange")
                        ),
                        "bytes": result.moved_bytes,
                        "crossing_bytes": result.crossing_bytes,
                        "input_bytes": fed.moved_bytes,
                        "input_crossing_bytes": fed.crossing_bytes,
                    },
                    "balance": balance_metrics(fed.batches),
                    "phases": phase_metrics(fed.batches),
                    "bad_examples": fed.num_bad + self.job.dataset.left_out.num_bad,
                    "left_out": [{"file": bad.file, "line": bad.where, "why": bad.reason} for bad in fed.left_out],
                }
            )
        return stopping

    def _evaluate(self) -> None:
        if self.job.evaluator is None:
            return
        evaluation = self.job.evaluator.run(self.job.model)
        self.evaluations[self.job.progress.step] = evaluation
        if self.log is not None:
            self.log.write_heldout(self.job.progress.step, evaluation.loss, evaluation.exact_match)
            answers = [dataclasses.asdict(answer) | {"is_exact": answer.is_exact} for answer in evaluation.samples]
            (self.recipe.run.dir / "answers.json").write_text(json.dumps(answers, ensure_ascii=False, indent=1))

    def _leave_early(self) -> None:
        self.job.checkpointer.wait()
        number = max(self.world.gather(self.stop.received))
        self._say(f"Asked to stop: step {self.job.progress.step} is saved, and the same command goes on from it.")
        raise SystemExit(128 + number)

    def _write_trace(self) -> None:
        if self.spans is None:
            return
        spans = [span for told in self.world.gather(self.spans) for span in told]
        if self.world.is_first:
            Timeline.of(spans).write_chrome_trace(self.recipe.run.dir / "trace.json")
            last = max((span.step for span in spans), default=0)
            write_html(
                Timeline.of(span for span in spans if span.step == last),
                self.recipe.run.dir / "timeline.html",
                title=f"Step {last + 1}, measured",
            )

    def _write_summary(self) -> None:
        run_dir = self.recipe.run.dir
        wall_s = time.perf_counter() - self.start_s
        summary = summarise(run_dir, self.world, self.peak, wall_s, self.evaluations)
        (run_dir / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        report = write_report(run_dir)
        for line in summary_lines(summary):
            _say_plainly(line)
        _say_plainly(f"Report: {report}")

    def _report(self, bad: BadExample) -> None:
        self._say(f"Left out, on all ranks: {bad}")

    def _say(self, sentence: str) -> None:
        if self.log is not None:
            self.log.say(sentence)


def _prepare_folder(recipe: Recipe) -> None:
    try:
        recipe.run.dir.mkdir(parents=True, exist_ok=True)
        (recipe.run.dir / "recipe.toml").write_text(dump_recipe(recipe), encoding="utf-8")
    except OSError as error:
        raise UserError(f"run.dir = {recipe.run.dir} cannot be written: {error.strerror}.") from error


def _is_due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _say_plainly(sentence: str) -> None:
    print(sentence, flush=True)


def _say_nothing(sentence: str) -> None:
    pass
