"""Lowered program -> Python source that a person reads, steps through and keeps."""

from autopar.render.check import check_source, load
from autopar.render.compiled import check_backend
from autopar.render.manifest import make_manifest
from autopar.render.module import manifest_source, render, render_linked

__all__ = ["check_backend", "check_source", "load", "make_manifest", "manifest_source", "render", "render_linked"]
