"""The whole pipeline on real input: a GPT-2 of 10M parameters on the sources of Python's standard library.

It is planned for a few workers of this machine, explained, and trained with `autopar.compile` beside the same model on
one process: the same initial weights, the same batches. What comes out is both loss curves, and what was predicted beside
what was measured.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.compiler import plan_of
from autopar.errors import AutoparError
from autopar.measure.resident import forget_peak, give_back, give_back_at_once, now_bytes, peak_bytes
from autopar.report.text import plan_text
from autopar.report.units import bytes_text, count_text, seconds_text, table

__all__ = ["Measured", "Outcome", "build_model", "corpus", "draw_batches", "run_demo"]

BATCH, SEQUENCE = 8, 128  # a step of one process takes under a second on two cores
SMALL_SEQUENCE = 8  # of the model that is trained first
CORPUS_BYTES = 8 * 2**20
LEARNING_RATE = 3e-4
WARM_UP = 2  # steps not timed: the first allocate, and start the links between workers
TOLERANCE = 1e-3  # relative, of every step's loss in float32: sums are taken in another order than on one process


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One training run. memory_bytes: growth of the resident set (CPU) or allocated memory (GPU) from before the model was built to the
    peak of its steps but the first, None where the system does not tell. A smaller model has been trained then, so that code is not
    counted. It is of another run, of few steps, in which the allocator of a CPU gives back at once what is not in use, and is slower for
    it."""

    losses: tuple[float, ...]
    step_times_s: tuple[float, ...]
    memory_bytes: int | None

    @property
    def step_time_s(self) -> float:
        return statistics.median(self.step_times_s[WARM_UP:] or self.step_times_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the demo showed. fullest_memory_bytes: measured, of the worker that took most; predicted_memory_bytes: without what a process
    takes before its first tensor, as measured."""

    gpus: int
    single: Measured
    parallel: Measured
    fullest_memory_bytes: int | None
    predicted_step_time_s: float
    predicted_memory_bytes: int
    written: tuple[str, ...]

    @property
    def worst_difference(self) -> float:
        """Of the two loss curves, relative."""
        return max(abs(a - b) / abs(a) for a, b in zip(self.single.losses, self.parallel.losses, strict=True))

    @property
    def ok(self) -> bool:
        return self.worst_difference <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "worst_difference": self.worst_difference, "ok": self.ok}


def run_demo(*, gpus: int, steps: int, folder: Path, pins: autopar.Pins | None = None) -> Outcome:
    """Plan, explain, train both ways, compare; prints as it goes. Writes the plan and the emitted module to `folder`."""
    console = Console(highlight=False)
    text = corpus()
    batches = draw_batches(text, steps)
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"GPT-2 with {count_text(parameters)} parameters, bytes of Python's standard library ({bytes_text(text.numel())}), "
        f"{steps} steps of {BATCH} x {SEQUENCE} bytes\n"
    )
    with console.status(f"planning for {gpus} workers"):
        start = time.perf_counter()
        # Workers are on GPUs only if there is one for each of them (autopar.launch).
        cluster = "auto" if torch.cuda.device_count() >= gpus else "cpu"
        captured = capture(model, _inputs(batches[0]))
        plan = plan_of(captured, gpus, cluster=cluster, optimizer="adamw", pins=pins, measure="live")
        took = time.perf_counter() - start
    folder.mkdir(parents=True, exist_ok=True)
    plan_file = folder / "plan.json"
    plan.save(plan_file)
    console.print(plan_text(plan), markup=False, soft_wrap=True)
    console.print(f"\nplanned in {seconds_text(took)}\n")

    single = train_single(batches)
    console.print(f"starting {gpus} workers, each of which captures the model and takes its part; then again, for the memory alone")
    workers = autopar.launch(train_worker, batches, str(plan_file), str(folder), gpus=gpus)
    (alone,) = autopar.launch(memory_of_one, batches, gpus=1)
    each = autopar.launch(memory_of_worker, batches, str(plan_file), gpus=gpus)
    outcome = Outcome(
        gpus=gpus, single=replace(single, memory_bytes=alone), parallel=replace(workers[0], memory_bytes=each[0]),
        fullest_memory_bytes=max((nbytes for nbytes in each if nbytes is not None), default=None),
        predicted_step_time_s=plan.step_time_s,
        predicted_memory_bytes=max(s.memory.total_bytes - s.memory.framework_context_bytes for s in plan.stages),
        written=tuple(str(path) for path in sorted(folder.iterdir())),
    )  # fmt: skip
    console.print(outcome_text(outcome), markup=False, soft_wrap=True)
    return outcome


# ------------------------------------------------------------------------------------------------- the job: data, model
def corpus() -> Tensor:
    """Sources of the standard library in the order of their paths, as bytes (uint8[n])."""
    chunks, length = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        chunks.append(path.read_bytes())
        length += len(chunks[-1])
        if length >= CORPUS_BYTES:
            break
    if length < 2 * SEQUENCE:
        raise AutoparError(f"there are no sources of the standard library in {sysconfig.get_paths()['stdlib']}, which the demo trains on")
    return torch.frombuffer(bytearray(b"".join(chunks)), dtype=torch.uint8)


def draw_batches(text: Tensor, steps: int) -> Tensor:
    """Random windows of the text, the same for every caller: uint8[steps, BATCH, SEQUENCE]."""
    starts = torch.randint(text.numel() - SEQUENCE, (steps * BATCH,), generator=torch.Generator().manual_seed(0))
    return torch.stack([text[s : s + SEQUENCE] for s in starts.tolist()]).view(steps, BATCH, SEQUENCE)


def build_model(width: int = 384, layers: int = 6) -> nn.Module:
    """GPT-2 of six layers over bytes, without dropout, the same weights for every caller."""
    config_class, model_class = _gpt2()
    torch.manual_seed(0)
    config = config_class(
        vocab_size=256, n_positions=SEQUENCE, n_embd=width, n_layer=layers, n_head=6, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model: nn.Module = model_class(config)
    model.__dict__["loss_type"] = "ForCausalLM"  # transformers warns where it has to guess this
    return model


def _small() -> nn.Module:
    return build_model(width=12, layers=2)


def _gpt2() -> tuple[Any, Any]:
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ModuleNotFoundError as error:
        raise AutoparError(f"the demo trains a model of transformers ({error}); pip install 'autopar[demo]'") from error
    return GPT2Config, GPT2LMHeadModel


def _inputs(batch: Tensor) -> dict[str, Tensor]:
    return {"input_ids": batch.long(), "labels": batch.long()}


# ---------------------------------------------------------------------------------------------------------- training
def train_single(batches: Tensor) -> Measured:
    """The model as it is, on this process."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _train(build_model().to(device), batches, "one process", device)


def train_worker(batches: Tensor, plan_file: str, folder: str) -> Measured:
    """The compiled model, on one worker of several; the loop is the same."""
    model = autopar.compile(build_model(), example_inputs=_inputs(batches[0]), plan=plan_file)
    rank = torch.distributed.get_rank()
    if rank == 0:
        (Path(folder) / "module.py").write_text(model.source, encoding="utf-8")
    words = f"{torch.distributed.get_world_size()} workers" if rank == 0 else ""
    return _train(model, batches, words, str(model.device))


def memory_of_one(batches: Tensor) -> int | None:
    """Of the model as it is, on a process of its own."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return _grown(lambda: _small().to(device), lambda: build_model().to(device), batches, device)


def memory_of_worker(batches: Tensor, plan_file: str) -> int | None:
    """Of the compiled model, on one worker of several."""

    def small() -> nn.Module:
        few = _inputs(batches[0, :, :SMALL_SEQUENCE])
        return autopar.compile(_small(), example_inputs=few, pins={"pp": 1})

    def large() -> nn.Module:
        return autopar.compile(build_model(), example_inputs=_inputs(batches[0]), plan=plan_file)

    return _grown(small, large, batches, "cuda" if torch.cuda.is_available() else "cpu")


def _grown(small: Callable[[], nn.Module], large: Callable[[], nn.Module], batches: Tensor, device: str) -> int | None:
    """Bytes by which the memory of this process grows while a model is built and trained, after a small one has loaded the code. Of the
    steps after the first ones, in which what the loop holds of a call beside the loss is captured too."""
    give_back_at_once()
    _train(small(), batches[:WARM_UP, :, :SMALL_SEQUENCE], "", device)
    give_back()
    before = now_bytes()
    model = large()
    _train(model, batches[:WARM_UP], "", device)
    give_back()  # what it took to capture and to build
    forget_peak()
    _train(model, batches[: WARM_UP + 1], "", device)
    peak = peak_bytes()
    return None if peak is None or before is None else peak - before


def _train(model: nn.Module, batches: Tensor, words: str, device: str) -> Measured:
    """The training loop. words: what the progress bar says; nothing for no bar."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, times = [], []
    words_column, loss_column = TextColumn("{task.description:<14}"), TextColumn("loss {task.fields[loss]}")
    columns = (words_column, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), loss_column)
    with Progress(*columns, console=Console(stderr=True), disable=not words) as progress:
        task = progress.add_task(words, total=len(batches), loss="")
        for batch in batches:
            start = time.perf_counter()
            loss = model(**{name: value.to(device) for name, value in _inputs(batch).items()})
            loss = loss if isinstance(loss, Tensor) else loss.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(time.perf_counter() - start)
            progress.update(task, advance=1, loss=f"{losses[-1]:.4f}")
    return Measured(losses=tuple(losses), step_times_s=tuple(times), memory_bytes=None)


# ------------------------------------------------------------------------------------------------------------ report
def outcome_text(outcome: Outcome) -> str:
    """Both loss curves side by side, and what was predicted beside what was measured."""
    single, parallel = outcome.single, outcome.parallel
    top, width = max(*single.losses, *parallel.losses), 24
    rows = [
        (i + 1, f"{a:.4f}", "#" * round(width * a / top), f"{b:.4f}", "#" * round(width * b / top), f"{abs(a - b) / abs(a):.1e}")
        for i, (a, b) in enumerate(zip(single.losses, parallel.losses, strict=True))
    ]
    words = f"{outcome.gpus} workers"
    curves = table(("step", "one process", "loss", words, "loss", "difference"), rows)
    tokens = BATCH * SEQUENCE
    kind = "allocated" if torch.cuda.is_available() else "resident set, growth to its peak; what is freed is given back at once"
    kind = f"{kind}; after the first {WARM_UP} steps"
    memory = bytes_text(outcome.fullest_memory_bytes) if outcome.fullest_memory_bytes is not None else "not told by this system"
    figures = table(
        ("", "one process", words, "predicted"),
        [
            ("step time", *(seconds_text(m.step_time_s) for m in (single, parallel)), seconds_text(outcome.predicted_step_time_s)),
            ("tokens a second", *(f"{tokens / t:,.0f}" for t in (single.step_time_s, parallel.step_time_s, outcome.predicted_step_time_s))),
            (
                "memory of a worker", bytes_text(single.memory_bytes) if single.memory_bytes is not None else "-", memory,
                bytes_text(outcome.predicted_memory_bytes),
            ),
        ],
    )  # fmt: skip
    verdict = (
        f"the curves agree to {outcome.worst_difference:.1e}"
        if outcome.ok
        else f"THE CURVES DIFFER by {outcome.worst_difference:.1e}, more than {TOLERANCE:.0e}: this is a defect, please report it"
    )
    files = "\n".join(f"  {path}" for path in outcome.written)
    return f"\n{curves}\n\n{verdict} (relative, float32)\n\n{figures}\n  (memory: {kind})\n\nwritten\n{files}"
