"""A Program and the times of its actions into a Timeline. Its words: docs/glossary.md."""

from motet.simulate.bubbles import BUBBLE_KINDS, Bubbles, bubbles
from motet.simulate.engine.simulate import simulate
from motet.simulate.engine.stage_times import Part, StageTimes, stage_times

__all__ = ["BUBBLE_KINDS", "Bubbles", "Part", "StageTimes", "bubbles", "simulate", "stage_times"]
