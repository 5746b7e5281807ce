"""Plans into Programs: what each program rank does in a step, and in which order. Words: docs/glossary.md."""

from motet.schedule.check.error import ScheduleError
from motet.schedule.check.fit import check_fit
from motet.schedule.check.memory import high_water
from motet.schedule.check.validate import validate
from motet.schedule.from_plan import (
    PlannedProgram,
    check_fills,
    executed_program,
    fillable,
    planned,
    program_of,
    program_of_batch,
)
from motet.schedule.generators.bubble_filling import EncoderPipeline, coarse_fills, fill_bubbles, global_order
from motet.schedule.generators.dag import dag_1f1b, dag_gpipe
from motet.schedule.generators.data_parallel import data_parallel
from motet.schedule.generators.disaggregated import Pipeline, UnitEdge, disaggregated
from motet.schedule.generators.gpipe import gpipe
from motet.schedule.generators.interleaved_1f1b import interleaved_1f1b
from motet.schedule.generators.modality_parallel import add_replicas, modality_parallel
from motet.schedule.generators.one_f_one_b import one_f_one_b
from motet.schedule.generators.zb_h1 import zb_h1
from motet.schedule.generators.zb_v import zb_v
from motet.schedule.layout import PlannedStage, parts_of, pieces_of
from motet.schedule.passes import (
    Presence,
    Sharding,
    add_communication,
    add_exchanges,
    add_fsdp,
    add_recompute,
    split_parts,
    without_absent,
)
from motet.schedule.passes.data_parallel import add_data_parallel
from motet.schedule.program import Action, Kind, Program, Stage
from motet.schedule.text import dumps, loads, parse_action

__all__ = [
    "Action",
    "EncoderPipeline",
    "Kind",
    "Pipeline",
    "PlannedProgram",
    "PlannedStage",
    "Presence",
    "Program",
    "ScheduleError",
    "Sharding",
    "Stage",
    "UnitEdge",
    "add_communication",
    "add_data_parallel",
    "add_exchanges",
    "add_fsdp",
    "add_recompute",
    "add_replicas",
    "check_fills",
    "check_fit",
    "coarse_fills",
    "dag_1f1b",
    "dag_gpipe",
    "data_parallel",
    "disaggregated",
    "dumps",
    "executed_program",
    "fill_bubbles",
    "fillable",
    "global_order",
    "gpipe",
    "high_water",
    "interleaved_1f1b",
    "loads",
    "modality_parallel",
    "one_f_one_b",
    "parse_action",
    "parts_of",
    "pieces_of",
    "planned",
    "program_of",
    "program_of_batch",
    "split_parts",
    "validate",
    "without_absent",
    "zb_h1",
    "zb_v",
]
