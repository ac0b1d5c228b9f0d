"""What a pair would do on a machine, reckoned before anybody rents it: step times, speed, memory, and the best setting.

    acceptance  tokens a step, from published acceptance lengths     models  sizes as work is counted from them
    ops         the kinds of work of a step                          steps   a step of each method, as such work
    roofline, measured  seconds of such work                         memory  bytes of a rank
    sweep       batches and draft lengths, the Pareto front, the choice for a goal
    residuals   the model beside published measurements              picture, report  what people see

docs/plan.md explains the model and how far off it is.
"""

from dflash_trt.plan.acceptance import Acceptance, fit_rates
from dflash_trt.plan.memory import Memory, measure_memory
from dflash_trt.plan.models import Model, Split, read_model
from dflash_trt.plan.steps import METHODS, Method, build_step
from dflash_trt.plan.sweep import Point, pareto, sweep

__all__ = [
    "METHODS",
    "Acceptance",
    "Memory",
    "Method",
    "Model",
    "Point",
    "Split",
    "build_step",
    "fit_rates",
    "measure_memory",
    "pareto",
    "read_model",
    "sweep",
]
