"""Imported by the fork server, once: see _verifier."""

from benchmarks._verifier import preload

preload()
