"""Who computes which item of a step, decided from a Plan and the lengths of the step alone.

These words mean one thing each, here and in all that reads from here:

item        what a module computes on: an image, a clip; for the backbone, the whole sequence of an example
microbatch  the part of a step that is computed at a time, by all replicas of all units together
replica     a data-parallel copy of a unit, counted over the whole job; under "data_parallel" that is a rank
position    the number of an item among those that its replica computes of a module in a microbatch, from 0
index       the number of an example in a microbatch of dp * microbatch_size examples of a pipeline (`Batching`)
slot        rank and position as one number, in one phase of one microbatch (`core.assignment.Assignment`)

An `Assignment` has one phase of one microbatch. A `StepAssignment` has all modules in all microbatches: item ->
(replica, microbatch, position). `assign_step` makes it, in the way that the Plan asks for:

data_parallel.py  an `Orchestrator` decides each microbatch, as in training; `joined` makes one step of its decisions
pipeline.py       a `Batching` says the microbatch and the index of each example: in the given order, or by ordering.py

rows.py says which rows then go from replica to replica.

The words are in docs/glossary.md.
"""
