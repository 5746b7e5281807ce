"""A Program and the times of its actions into a Timeline."""

from motet.simulate.simulate import simulate
from motet.simulate.times import Part, StageTimes, stage_times

__all__ = ["Part", "StageTimes", "simulate", "stage_times"]
