"""Checkpoints: one folder under the original model's names, written and read by any number of processes under any plan."""

from autopar.checkpoint.loading import load
from autopar.checkpoint.saving import Saving, save
from autopar.checkpoint.storage import CheckpointReader

__all__ = ["CheckpointReader", "Saving", "load", "save"]
