"""Plans into Programs: what each pipeline rank does in a step, in which order."""

from motet.schedule.error import ScheduleError
from motet.schedule.gpipe import gpipe
from motet.schedule.interleaved_1f1b import interleaved_1f1b
from motet.schedule.memory import high_water
from motet.schedule.one_f_one_b import one_f_one_b
from motet.schedule.passes import add_communication, add_recompute, split_parts
from motet.schedule.program import Action, Kind, Program, Stage
from motet.schedule.text import dumps, loads, parse_action
from motet.schedule.validate import validate
from motet.schedule.zb_h1 import zb_h1
from motet.schedule.zb_v import zb_v

__all__ = [
    "Action",
    "Kind",
    "Program",
    "ScheduleError",
    "Stage",
    "add_communication",
    "add_recompute",
    "dumps",
    "gpipe",
    "high_water",
    "interleaved_1f1b",
    "loads",
    "one_f_one_b",
    "parse_action",
    "split_parts",
    "validate",
    "zb_h1",
    "zb_v",
]
