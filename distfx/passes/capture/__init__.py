"""capture: from an unmodified ``nn.Module`` to a functional FX graph of ATen calls."""

from distfx.passes.capture.examples import constants_of, infer_inputs
from distfx.passes.capture.export import capture
from distfx.passes.capture.modes import Mode, without_modes
from distfx.passes.capture.normalize import is_impure
from distfx.passes.capture.result import Capture, InputSpec
from distfx.passes.capture.supported import check_model, check_supported

__all__ = [
    "Capture",
    "InputSpec",
    "Mode",
    "capture",
    "check_model",
    "check_supported",
    "constants_of",
    "infer_inputs",
    "is_impure",
    "without_modes",
]
