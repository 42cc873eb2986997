"""nn.Module + example inputs -> Program: torch.export, made functional and normalised, repeated blocks found, checked."""

from autopar.capture.alike import captured_alike
from autopar.capture.captured import Captured
from autopar.capture.fingerprint import program_hash
from autopar.capture.interpret import run_op, run_program
from autopar.capture.lift import LOWER_PRECISIONS, float64_by_default, in_float64, lift_to_float64, to_float64
from autopar.capture.tries import capture

__all__ = [
    "Captured", "LOWER_PRECISIONS", "capture", "captured_alike", "float64_by_default", "in_float64", "lift_to_float64", "program_hash",
    "run_op", "run_program", "to_float64",
]  # fmt: skip
