"""All programs of `traps`: importing this enters them into the table."""

from benchmarks import _traps_calls as _calls
from benchmarks import _traps_changes as _changes
from benchmarks import _traps_evaluation as _evaluation
from benchmarks import _traps_holders as _holders
from benchmarks import _traps_modules as _modules
from benchmarks import _traps_objects as _objects
from benchmarks import _traps_optimizers as _optimizers
from benchmarks import _traps_outputs as _outputs
from benchmarks import _traps_parts as _parts
from benchmarks import _traps_random as _random
from benchmarks import _traps_recapture as _recapture
from benchmarks import _traps_rules as _rules
from benchmarks import _traps_settings as _settings
from benchmarks import _traps_state as _state
from benchmarks import _traps_together as _together
from benchmarks import _traps_tools as _tools
from benchmarks import _traps_training as _training
from benchmarks import _traps_wrapped as _wrapped
from benchmarks._traps_kit import PROGRAMS

__all__ = ["PROGRAMS"]

del _calls, _changes, _evaluation, _holders, _modules, _objects, _optimizers, _outputs, _parts, _random, _rules, _settings, _state
del _recapture, _together, _tools, _training, _wrapped
