"""What emitted modules import, and what runs them. It knows torch and the plan's vocabulary, and not the planner."""

from autopar.run import collectives, local_ops
from autopar.run.form import Emitted
from autopar.run.launch import WorkerPool, launch
from autopar.run.manifest import BufferSpec, InputSpec, Manifest, OutputSpec, ParamSpec
from autopar.run.mesh import Axis, Mesh
from autopar.run.module import ParallelModule
from autopar.run.stage import Stage, recompute
from autopar.run.weights import Weights

__all__ = [
    "Axis", "BufferSpec", "Emitted", "InputSpec", "Manifest", "Mesh", "OutputSpec", "ParallelModule", "ParamSpec", "Stage",
    "Weights", "WorkerPool", "collectives", "launch", "local_ops", "recompute",
]  # fmt: skip
