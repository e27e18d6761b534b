"""distfx: train an unmodified PyTorch CNN over samples, channels, filters and space at once.

>>> import distfx                                                                       # doctest: +SKIP
>>> net = distfx.parallelize(model, distfx.Grid(n=2, c=2, h=2))                         # doctest: +SKIP
"""

from distfx import testing
from distfx.api import explain, parallelize, plan
from distfx.errors import (
    CaptureError,
    CommunicationError,
    DistfxError,
    FallbackWarning,
    NonFiniteError,
    RankMismatchError,
)
from distfx.grid import Grid
from distfx.ir.layout import Layout, Window
from distfx.loss import with_loss
from distfx.module import ParallelModule
from distfx.report.ledger import Ledger, record_comm
from distfx.report.plan import Plan, PlanRow
from distfx.rules.registry import register_rule
from distfx.runtime.comm import groups as _groups  # noqa: F401  (connects grids with processes)
from distfx.runtime.comm.launch import init
from distfx.training.checkpoint import Checkpoint, load, save

__version__ = "0.1.0"
__all__ = [
    "CaptureError",
    "Checkpoint",
    "CommunicationError",
    "DistfxError",
    "FallbackWarning",
    "Grid",
    "Layout",
    "Ledger",
    "NonFiniteError",
    "ParallelModule",
    "Plan",
    "PlanRow",
    "RankMismatchError",
    "Window",
    "explain",
    "init",
    "load",
    "parallelize",
    "plan",
    "record_comm",
    "register_rule",
    "save",
    "testing",
    "with_loss",
]
