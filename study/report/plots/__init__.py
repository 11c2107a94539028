"""The figures of a report. Each function takes Records and gives drawings, or a sentence that says why not."""

from study.report.plots.canvas import Drawing
from study.report.plots.fits import what_fits
from study.report.plots.loss import loss_curves, loss_differences
from study.report.plots.memory import model_state, peak_memory
from study.report.plots.profile import step_profile
from study.report.plots.scaling import batch_size, model_size, scaling
from study.report.plots.time import frontier, offload, step_time, traffic
from study.report.plots.virtual import settings, table1

__all__ = [
    "Drawing", "batch_size", "frontier", "loss_curves", "loss_differences", "model_size", "model_state", "offload",
    "peak_memory", "scaling", "settings", "step_profile", "step_time", "table1", "traffic", "what_fits",
]  # fmt: skip
