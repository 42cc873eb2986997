"""A training script as people write them, run in many pairs of processes: `python exit_forms.py PAIRS FORM [FORM ...]`.

Each pair is forked from one process that has imported everything, goes on as a script of its own, and ends as an interpreter ends.
FORM: how the script ends. Prints one line for each pair whose ranks did not end as they must or said something, then 'FORM: pairs N'.
"""

import atexit
import os
import shutil
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


groups_made: "weakref.WeakSet[dist.ProcessGroup]"  # by autopar


@atexit.register  # before anything of torch's or autopar's, so that it runs after all of that
def _check() -> None:
    if len(groups_made):
        os.write(2, b"process groups are alive when the interpreter begins to finalize\n")
        os._exit(9)


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from run_model import Model, batch, emitted, tensors  # noqa: E402

import autopar.run.preloaded  # noqa: E402, F401  (once, not in each rank)
from autopar.run import ParallelModule  # noqa: E402

groups_made = weakref.WeakSet()
_new_group = dist.new_group


def _noted(*args: Any, **kwargs: Any) -> Any:
    made = _new_group(*args, **kwargs)
    groups_made.add(made)
    return made


dist.new_group = _noted

PAIRS, FORMS = int(sys.argv[1]), sys.argv[2:]
EXPECTED = {"raises": 1, "exits": 3}


def _become_a_rank(folder: str) -> str | None:
    """The form of a rank in each rank; None in the process that has seen all pairs end."""
    for form in FORMS:
        children = []
        for pair in range(PAIRS):  # side by side
            for rank in range(2):
                said = f"{folder}/{form}-{pair}-{rank}"
                child = os.fork()
                if child == 0:
                    for stream in (1, 2):
                        os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
                    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{form}-{pair}", 2), rank=rank, world_size=2)
                    return form
                children.append((pair, child, said))
        for pair, child, said in children:
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            words = Path(said).read_text() if form != "raises" else ""  # of which it is the traceback
            if code != EXPECTED.get(form, 0) or words:
                print(f"{form}: a rank of pair {pair} ended with {code} {words}", flush=True)
        print(f"{form}: pairs {PAIRS}", flush=True)
    return None


def main() -> tuple[ParallelModule, torch.optim.Optimizer, torch.Tensor]:
    model = ParallelModule(emitted(dp=2), tensors(Model().double()), device="cpu")
    assert len(groups_made)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        loss = model(**batch(step))
        loss.backward()
        if FORM == "raises" and step == 2:
            raise RuntimeError("on purpose")
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss


folder = tempfile.mkdtemp()
FORM = _become_a_rank(folder)
if FORM is None:
    shutil.rmtree(folder)
    os._exit(0)
if FORM == "raises":
    atexit.unregister(_check)  # the groups of a rank that failed are left alone

if FORM == "inside main":
    main()
else:
    model, optimizer, loss = main()
    if FORM == "saved last":
        state = model.full_state_dict()
    elif FORM == "destroyed":
        dist.destroy_process_group()
    elif FORM == "deleted":
        del model, optimizer, loss
        dist.destroy_process_group()
    elif FORM == "exits":
        sys.exit(3)
