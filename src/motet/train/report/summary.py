"""The summary of a run, `summary.json`, from all lines of `metrics.jsonl`, also those before the run was resumed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

from motet.core.errors import UserError
from motet.core.words import counted_words, shown_seconds
from motet.cost.profile import PROFILE_FILE
from motet.runtime.sent_bytes import SENT_KINDS
from motet.train.evaluate import Evaluation
from motet.train.report.beside import AT_ASSUMED_SPEED
from motet.train.report.peak import Peak
from motet.train.report.step_lines import HELDOUT_FILE, read_lines
from motet.train.world import World

_LOSS_STEPS = 10


def summarise(
    run_dir: Path, world: World, peak: Peak, wall_s: float, evaluations: dict[int, Evaluation]
) -> dict[str, Any]:
    """The summary of all steps in the run's folder. evaluations: step -> Evaluation, since the run went on.

    loss_first, loss_last: means over the first and the last loss_steps steps with a finite loss. loss_steps is 10, or
                           half of these steps if there are fewer than 20, so that no step counts in both.
    tokens_per_s, mfu, hfu: over the time of steps only; hfu is None for a run that an earlier version began.
    padding:               the share of operations that padding takes, over the time of steps; None as hfu.
    wall_s:                time of this process, without the parts of the run before it was resumed.
    exact_match:           of the last evaluation.
    overflows, loss_scale: steps that changed nothing as gradients overflowed float16, and the scale of the last step.
    ahead:                 the most that was loaded ahead, and that it took; None as hfu.
    bytes:                 what all ranks sent, by kind; None for a run that an earlier version began.
    predicted_s, measured_s, makespan_error, bubbles: of the steps after the first ones that were predicted, as medians;
                           the makespan from the first action of any rank to the last, measured over predicted less 1,
                           and seconds by kind on the busiest rank. None where no step was predicted.
    is_profiled:           whether the run's folder has a profile; without one, predictions are of an assumed speed.
    Raises UserError if there are no steps.
    """
    steps = read_lines(run_dir / "metrics.jsonl")
    if not steps:
        raise UserError(f"{run_dir} holds no metrics of the steps already done, so there is nothing to sum up.")
    train_s = sum(step["step_s"] for step in steps)
    divisor_s = max(train_s, 1e-9)
    num_tokens = sum(step["num_tokens"] for step in steps)
    losses = [step["loss"] for step in steps if step["loss"] is not None]
    loss_steps = min(_LOSS_STEPS, max(len(losses) // 2, 1))
    last = evaluations[max(evaluations)] if evaluations else None
    evaluated = read_lines(run_dir / HELDOUT_FILE) if (run_dir / HELDOUT_FILE).exists() else []
    heldout = {line["step"]: line["loss"] for line in evaluated}
    heldout |= {step: evaluation.loss for step, evaluation in evaluations.items()}
    return {
        "steps": len(steps),
        "num_ranks": world.num_ranks,
        "device": str(world.device.type),
        "wall_s": round(wall_s, 2),
        "train_s": round(train_s, 2),
        "tokens": num_tokens,
        "tokens_per_s": round(num_tokens / divisor_s, 1),
        "mfu": sum(step["mfu"] * step["step_s"] for step in steps) / divisor_s,
        "hfu": _over_time(steps, "hfu"),
        "padding": _over_time(steps, "padding"),
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "loss_steps": loss_steps,
        "loss_first": _mean(losses[:loss_steps]) if losses else None,
        "loss_last": _mean(losses[-loss_steps:]) if losses else None,
        "loss_heldout": last.loss if last else None,
        "heldout_loss_by_step": {str(step): heldout[step] for step in sorted(heldout)},
        "losses_heldout": last.losses_made if last else {},
        "exact_match": last.exact_match if last else {},
        "num_heldout": last.num_examples if last else {},
        "balance": _balance(steps),
        "phases": _phases(steps),
        "data_wait_share": sum(step["data_wait_s"] for step in steps) / divisor_s,
        # Not every kernel counts it, and lines of earlier versions do not have it.
        "core_wait_share": sum(step.get("core_wait_s") or 0.0 for step in steps) / divisor_s,
        "decide_s_mean": _mean([step["decide_s"] for step in steps]),
        "bytes": _bytes(steps),
        "exchange_bytes": sum(step["exchange"]["bytes"] for step in steps),
        "exchange_crossing_bytes": sum(step["exchange"]["crossing_bytes"] for step in steps),
        "memory": max((step["memory"] for step in steps), key=lambda memory: memory["peak_bytes"]),
        "ahead": _ahead(steps),
        **_beside(steps),
        "is_profiled": (run_dir / PROFILE_FILE).exists(),
        "bad_examples": steps[-1]["bad_examples"],
        "bad_steps": sum(step.get("bad_step") is not None for step in steps),
        "overflows": sum(step.get("overflow", False) for step in steps),
        "loss_scale": steps[-1].get("loss_scale"),
    }


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """The summary as lines for a terminal."""
    heldout = "" if summary["loss_heldout"] is None else f", {summary['loss_heldout']:.4f} held out"
    heldout += "".join(f", {loss:.4f} of {name}" for name, loss in summary.get("losses_heldout", {}).items())
    lines = [
        f"{counted_words(summary['steps'], 'step')} on {counted_words(summary['num_ranks'], 'rank')} in "
        f"{shown_seconds(summary['train_s'])}: {summary['tokens_per_s']:,.0f} tokens/s, MFU "
        f"{summary['mfu']:.1%}{_hfu_words(summary)} of the {summary['peak_source']} peak",
        _loss_line(summary) + heldout,
    ]
    if summary["bad_steps"]:
        lines.append(f"{_were(summary['bad_steps'])} not finite and changed nothing; bad_steps.jsonl names them")
    if summary["overflows"]:
        lines.append(
            f"{counted_words(summary['overflows'], 'step')} overflowed float16 and changed nothing; the last loss "
            f"scale was {summary['loss_scale']:,.0f}"
        )
    for name, phase in shared_phases(summary).items():
        lines.append(
            f"{name}: mean max/bound load {phase['max_over_bound_before']:.3f} before balancing, "
            f"{phase['max_over_bound']:.3f} after, in {phase['unit']}"
        )
    if summary["balance"]["why"]:
        lines.append(f"balanced by {methods_line(summary['balance']['methods'])}")
    if cut := summary["balance"]["cut"]:
        gained = "" if cut["gained_s"] is None else f", {_gained_words(cut['gained_s'])} by prediction"
        items = f" and {counted_words(cut['items'], 'item')} of encoders" if cut["items"] else ""
        what = f"{counted_words(cut['sequences'], 'sequence')}{items}"
        needed = f", {cut['by_memory']:,} of which no rank could hold whole" if cut["by_memory"] else ""
        lines.append(f"{what} cut over ranks in {_microbatches(cut['microbatches'])}{needed}{gained}")
    if summary["makespan_error"] is not None:
        by = f" ({summary['makespan_error']:+.1%})" if summary["is_profiled"] else AT_ASSUMED_SPEED
        lines.append(
            f"a step takes {summary['measured_s']:.4g} s from its first action to its last, "
            f"{summary['predicted_s']:.4g} s predicted{by}"
        )
    for task, share in summary["exact_match"].items():
        lines.append(
            f"{task}: {share:.1%} of {counted_words(summary['num_heldout'][task], 'held-out answer')} "
            f"{'matches' if summary['num_heldout'][task] == 1 else 'match'} exactly"
        )
    return lines


def shared_phases(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The phases of a summary that several replicas share: one alone has nothing to balance."""
    return {name: phase for name, phase in summary["phases"].items() if phase["num_replicas"] > 1}


def _microbatches(number: int) -> str:
    return counted_words(number, "microbatch", "microbatches")


def _gained_words(seconds: float) -> str:
    return f"{abs(seconds):.3g} s {'lost' if seconds < 0 else 'gained'}"


def _were(number: int) -> str:
    return counted_words(number, "step was", "steps were")


def _hfu_words(summary: dict[str, Any]) -> str:
    return "" if summary["hfu"] is None else f" and HFU {summary['hfu']:.1%}"


def _loss_line(summary: dict[str, Any]) -> str:
    first, last, count = summary["loss_first"], summary["loss_last"], summary["loss_steps"]
    if first is None:
        return "no step with a finite loss"
    if summary["steps"] - summary["bad_steps"] == 1:
        return f"loss {first:.4f} in its one step"
    if count == 1:
        return f"loss {first:.4f} in its first step, {last:.4f} in its last"
    return f"loss {first:.4f} at first, {last:.4f} at last (means of {count} steps)"


def methods_line(methods: dict[str, int]) -> str:
    """How often each method of balancing was chosen, the most frequent first: "joint 9, mixed 3 of 12 microbatches"."""
    counts = ", ".join(f"{method} {count:,}" for method, count in sorted(methods.items(), key=lambda entry: -entry[1]))
    return f"{counts} of {_microbatches(sum(methods.values()))}"


def _balance(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """How often each method was chosen, and why the most frequent was, when it was last chosen."""
    methods: Counter[str] = Counter()
    why: dict[str, str] = {}
    for step in steps:
        methods.update(step["balance"]["methods"])
        why |= step["balance"]["why"]
    most = max(methods, key=lambda method: methods[method])
    # Lines of earlier versions do not say what was cut.
    return {
        "methods": dict(methods),
        "why": why.get(most, ""),
        "cut": _cut([step["balance"].get("cut") for step in steps]),
    }


def _cut(steps: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What was cut in all steps, of what each says; None if nothing was."""
    cut = [step for step in steps if step is not None]
    gained_s = [step["gained_s"] for step in cut if step["gained_s"] is not None]
    sums = {key: sum(step[key] for step in cut) for key in ("sequences", "microbatches")}
    # Lines of earlier versions know neither items nor memory.
    sums["by_memory"] = sum(step.get("by_memory", 0) for step in cut)
    items = sum(of["cut"] for step in cut for of in step.get("items", {}).values())
    return {**sums, "items": items, "gained_s": sum(gained_s) if gained_s else None} if cut else None


def _phases(steps: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Phase -> its replicas, the unit of their loads, and means over the steps in which it has any load."""
    means = {}
    for name, last in steps[-1]["phases"].items():
        busy = [step["phases"][name] for step in steps if step["phases"][name]["bound"]]
        means[name] = {"unit": last["unit"], "num_replicas": len(last["loads"])} | {
            key: _mean([phase[key] for phase in busy]) if busy else 1.0
            for key in ("max_over_bound_before", "max_over_bound")
        }
    return means


def steady(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the first steps, which are slower, as they allocate memory and warm up."""
    return steps[min(len(steps) // 10, 10) :]


def _beside(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured beside what was predicted; lines of earlier versions have neither."""
    counted = steady(steps)
    if all(step.get("predicted_s") is None for step in counted):
        measured = _bubbles(counted, "bubbles_s")
        return {
            "predicted_s": None,
            "measured_s": None,
            "makespan_error": None,
            "bubbles": {"measured": measured, "predicted": None},
        }
    counted = [step for step in counted if step.get("predicted_s") is not None]
    predicted_s, measured_s = (median(step[key] for step in counted) for key in ("predicted_s", "makespan_s"))
    return {
        "predicted_s": predicted_s,
        "measured_s": measured_s,
        "makespan_error": measured_s / predicted_s - 1,
        "bubbles": {
            "measured": _bubbles(counted, "bubbles_s"),
            "predicted": _bubbles(counted, "predicted_bubbles_s"),
        },
    }


def _ahead(steps: list[dict[str, Any]]) -> dict[str, int] | None:
    """The most of each figure over the steps, and the fewest workers; None if the last line lacks one."""
    lines = [step["ahead"] for step in steps if "workers" in step.get("ahead", {})]
    if not lines:
        return None
    most = {key: max(line[key] for line in lines) for key in lines[-1] if key != "steps"}
    return most | {"fewest_workers": min(line["workers"] for line in lines)}


def _bytes(steps: list[dict[str, Any]]) -> dict[str, int] | None:
    """Bytes by kind, summed over steps; None if a line of an earlier version lacks them."""
    if any("bytes" not in step for step in steps):
        return None
    return {kind: sum(step["bytes"][kind] for step in steps) for kind in SENT_KINDS}


def _bubbles(steps: list[dict[str, Any]], key: str) -> dict[str, float]:
    """Seconds by kind, the median of the steps that have them."""
    found = [step[key] for step in steps if step.get(key)]
    return {kind: median(step[kind] for step in found) for kind in (found[0] if found else ())}


def _over_time(steps: list[dict[str, Any]], key: str) -> float | None:
    """The mean over the time of steps; None if a line of an earlier version lacks it."""
    if any(key not in step for step in steps):
        return None
    return sum(step[key] * step["step_s"] for step in steps) / max(sum(step["step_s"] for step in steps), 1e-9)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
