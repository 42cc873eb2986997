"""All programs of `traps`: importing this enters them into the table."""

from benchmarks._traps_kit import PROGRAMS
from benchmarks.trap_programs import across as _across
from benchmarks.trap_programs import aliased as _aliased
from benchmarks.trap_programs import asked as _asked
from benchmarks.trap_programs import batch_objects as _batch_objects
from benchmarks.trap_programs import becomes as _becomes
from benchmarks.trap_programs import border as _border
from benchmarks.trap_programs import bounded as _bounded
from benchmarks.trap_programs import calls as _calls
from benchmarks.trap_programs import chains as _chains
from benchmarks.trap_programs import changes as _changes
from benchmarks.trap_programs import counted as _counted
from benchmarks.trap_programs import edges as _edges
from benchmarks.trap_programs import elsewhere as _elsewhere
from benchmarks.trap_programs import evaluation as _evaluation
from benchmarks.trap_programs import given as _given
from benchmarks.trap_programs import gradients as _gradients
from benchmarks.trap_programs import habits as _habits
from benchmarks.trap_programs import heard as _heard
from benchmarks.trap_programs import holders as _holders
from benchmarks.trap_programs import hooked as _hooked
from benchmarks.trap_programs import idioms as _idioms
from benchmarks.trap_programs import itself as _itself
from benchmarks.trap_programs import known as _known
from benchmarks.trap_programs import left as _left
from benchmarks.trap_programs import lengths as _lengths
from benchmarks.trap_programs import memory as _memory
from benchmarks.trap_programs import methods as _methods
from benchmarks.trap_programs import modules as _modules
from benchmarks.trap_programs import momentum as _momentum
from benchmarks.trap_programs import named as _named
from benchmarks.trap_programs import objects as _objects
from benchmarks.trap_programs import optimizers as _optimizers
from benchmarks.trap_programs import outputs as _outputs
from benchmarks.trap_programs import padded as _padded
from benchmarks.trap_programs import parts as _parts
from benchmarks.trap_programs import published as _published
from benchmarks.trap_programs import questions as _questions
from benchmarks.trap_programs import random as _random
from benchmarks.trap_programs import ranks as _ranks
from benchmarks.trap_programs import reads as _reads
from benchmarks.trap_programs import recapture as _recapture
from benchmarks.trap_programs import rules as _rules
from benchmarks.trap_programs import scripts as _scripts
from benchmarks.trap_programs import settings as _settings
from benchmarks.trap_programs import sizes as _sizes
from benchmarks.trap_programs import state as _state
from benchmarks.trap_programs import structures as _structures
from benchmarks.trap_programs import together as _together
from benchmarks.trap_programs import tools as _tools
from benchmarks.trap_programs import training as _training
from benchmarks.trap_programs import turns as _turns
from benchmarks.trap_programs import varied as _varied
from benchmarks.trap_programs import wrapped as _wrapped

__all__ = ["PROGRAMS"]

del _across, _aliased, _asked, _batch_objects, _becomes, _border, _bounded, _calls, _chains, _changes, _counted, _edges, _elsewhere
del _evaluation, _given, _gradients, _habits, _heard, _holders, _hooked, _idioms, _itself, _known, _left, _lengths, _memory, _methods
del _modules, _momentum, _named, _objects, _optimizers, _outputs, _padded, _parts, _published, _questions, _random, _ranks, _reads
del _recapture, _rules, _scripts, _settings, _sizes, _state, _structures, _together, _tools, _training, _turns, _varied, _wrapped
