"""Plans into Programs: what each pipeline rank does in a step, in which order."""

from motet.schedule.gpipe import gpipe
from motet.schedule.interleaved_1f1b import interleaved_1f1b
from motet.schedule.one_f_one_b import one_f_one_b
from motet.schedule.program import Action, Kind, Program, Stage
from motet.schedule.zb_h1 import zb_h1
from motet.schedule.zb_v import zb_v

__all__ = [
    "Action",
    "Kind",
    "Program",
    "Stage",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "zb_h1",
    "zb_v",
]
