"""Options: public choices that compose with every method. Each is one file with its numbers and its state.

fodp.Plan(..., average=fodp.options.Ema(0.99))
fodp.Plan(..., params=dict(average="ema", average_decay=0.99))      # the same plan, in the flat spelling
"""

from fodp.options.average import Average, Ema, Power, RunningAverage, Tail
from fodp.options.chosen import Options
from fodp.options.clip import Clip, Flat, Normalised, PerLayer
from fodp.options.filter import Doppler, Filter, Fractional, Momentum
from fodp.options.option import Beginning, Option
from fodp.options.quantile import Quantile
from fodp.options.rate import Rate
from fodp.options.scaling import Factors, FanIn, Kronecker, Scaling, Transcript
from fodp.options.schedule import ClipSchedule, NoiseSchedule
from fodp.options.table import KINDS, OPTIONS, register, unregister
from fodp.options.update import Adam, AdamBC, AdamW, AdamWBC, Sgd, Update

__all__ = [
    "KINDS", "OPTIONS", "Adam", "AdamBC", "AdamW", "AdamWBC", "Average", "Beginning", "Clip", "ClipSchedule",
    "Doppler", "Ema", "Factors", "FanIn", "Filter", "Flat", "Fractional", "Kronecker", "Momentum", "NoiseSchedule",
    "Normalised", "Option", "Options", "PerLayer", "Power", "Quantile", "Rate", "RunningAverage", "Scaling", "Sgd",
    "Tail", "Transcript", "Update", "register", "unregister",
]  # fmt: skip
