"""Whether the items of a `[workload]` are those that a model of shapes computes on. It needs no torch."""

from __future__ import annotations

from collections.abc import Iterator

from motet.core.sampler import Sampler, Task
from motet.core.shape_tables import GeneratorShape, ModelShapes


def unfit_items(model: ModelShapes, workload: Sampler) -> Iterator[str]:
    """What training refuses of items, as clauses that begin with the key."""
    spec = model.spec("model")
    for number, task in enumerate(workload.task):
        for name, items in task.items.items():
            key = f"workload.task.{number}.items.{name}"
            if made := model.generators.get(name):
                if wrong := _unmade(task, name, made):
                    yield f"{key}.{wrong}"
                continue
            if name not in model.encoders:
                yield f"{key} has no effect on training, as there is no model.encoders.{name}"
                continue
            of_made = {"num_tokens": items.num_tokens is not None, "turn": items.turn}
            if stray := [said for said, is_there in of_made.items() if is_there]:
                yield (
                    f"{key}.{stray[0]} is for items of generators: the rows that model.encoders.{name} makes of an "
                    "item hang on its length; say length_per_token"
                )
                continue
            divisor = spec.module(name).layers[-1].divisor
            if items.length_per_token != divisor:
                yield (
                    f"{key}.length_per_token is {items.length_per_token:g}, but model.encoders.{name} makes a row "
                    f"of {divisor} (strides times projector.downsample)"
                )


def _unmade(task: Task, name: str, made: GeneratorShape) -> str:
    """What a task says of the items of a generator that does not fit it, from its key on; "" if all fits."""
    items, num_queries = task.items[name], made.num_queries
    if items.segment is not None:
        return f"segment has no effect on training: model.generators.{name} computes whole items; remove it"
    if items.turn != (made.max_turn is not None):
        given = "query tokens" if items.turn else "a turn"
        return f"turn is {str(items.turn).lower()}, but model.generators.{name} is given {given}; change one of them"
    if made.max_turn is not None:
        first, last = (text - int(task.num_targets(text)) for text in task.text.bounds)
        if first >= 1 and last <= made.max_turn:
            return ""
        return (
            f"turn: of the text of the task {first:,} to {last:,} tokens stand before the answer, but "
            f"model.generators.{name} is given 1 to {made.max_turn:,} (max_turn); change text, answer or max_turn"
        )
    least, most = (items.tokens_of(length) for length in items.length.bounds)
    if least == most == num_queries:
        return ""
    key = "length_per_token" if items.num_tokens is None else "num_tokens"
    count = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return (
        f"{key} has an item take {count} rows of the sequence, but model.generators.{name}.num_queries is "
        f"{num_queries}; give num_tokens = {num_queries} in its place"
    )
