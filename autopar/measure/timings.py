"""What `autopar profile` runs on a worker: operators on its device.

Each function here runs on every worker of a pool. Operators are run by all of them at once on CPUs, by rank 0 alone on GPUs. They are
timed as a training loop issues them, one after another, with one synchronisation at the end; on a CPU, where a worker has one thread, by
the time that the thread has a core, so that other processes do not count.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from autopar.measure.live import CPU_THREADS, REFUSALS, device_name
from autopar.measure.traffic import AS_TIMED
from autopar.run.launch import default_device
from cost_models.compute import causal_share
from cost_models.fit import OperatorTime

__all__ = ["DTYPES", "Machine", "Run", "Timed", "firsts", "machine", "operator_times", "repeated", "timed", "wait"]

REPEATS, FIRSTS = 11, 3
SAMPLE_S, MOST_LOOPS = 1e-3, 1000  # short operators are repeated within a sample until it takes about so long
SLOWEST_S = 0.15  # of two sizes of an operator, the larger is not measured if it would take longer
CASE_S = 0.2  # for the repeats of one case, which need not be many where one takes longer
# Of one operand: more than caches hold, but on a CPU less than what malloc asks the system for anew each time (32 MiB, mallopt(3)).
STREAMED_BYTES = {"cpu": 24 * 2**20, "cuda": 2**28}

DTYPES = ("float64", "float32", "tf32", "float16", "bfloat16")
Run = Callable[[], object]
Streaming = Callable[[torch.Tensor, torch.Tensor], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """memory_bytes: of the GPU, or of the whole machine where workers run on CPUs. context_bytes: that a worker takes before its
    first tensor. tf32: whether its products may be computed in it."""

    device: str
    name: str
    backend: str
    torch: str
    memory_bytes: int
    context_bytes: int
    tf32: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One operator on operands of one size. kind: as of operator_times. timing.measured_s: the median of the repeats; best_s: the least of
    them; cpu_share: of the time that passed, what this thread had a core for."""

    kind: str
    what: str
    timing: OperatorTime
    best_s: float
    cpu_share: float


# --------------------------------------------------------------------------------------------------------------- machine
def machine() -> Machine:
    """Of this worker, after it has run a product (libraries load code when they are first used)."""
    device = default_device()
    small = torch.ones(8, 8, device=device)
    torch.mm(small, small)
    cuda = device.type == "cuda"
    if cuda:
        wait(device)
        free, memory_bytes = torch.cuda.mem_get_info(device)
        context_bytes = memory_bytes - free - torch.cuda.memory_reserved(device)
    else:
        memory_bytes, context_bytes = _main_memory_bytes(), _resident_bytes()
    return Machine(
        device=device.type,
        name=device_name(device) + ("" if cuda else f" with {CPU_THREADS} thread"),
        backend=dist.get_backend(),
        torch=torch.__version__,
        memory_bytes=memory_bytes,
        context_bytes=context_bytes,
        tf32=cuda and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0),
    )


def _main_memory_bytes() -> int:
    """Of the machine, or of the container that this is."""
    limit = Path("/sys/fs/cgroup/memory.max")
    allowed = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total, int(allowed)) if allowed.isdecimal() else total


def _resident_bytes() -> int:
    """The resident set of this process; 0 where the system has no /proc."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


# ------------------------------------------------------------------------------------------------------------- operators
@dataclass(frozen=True, kw_only=True, slots=True)
class _Case:
    """An operator to time: its counts (as OperatorTime's), and `make`, which makes its operands and returns what runs it."""

    what: str
    op_class: str
    dtype: str
    flops: float = 0.0
    bytes_moved: float
    written: float = 0.0
    make: Callable[[], Run]


def operator_times(kind: str, dtype: str, largest: float) -> tuple[list[Timed], str]:
    """The operators of one kind (a class; or 'layer', 'image', 'depthwise': as models have them) in one dtype, ascending in size, and why
    there are not more: '' unless the device refused one, for want of a kernel or of memory. largest: side of the largest matrix; other
    operators shrink with it below 1024. On GPUs, which do not disturb each other, nothing on other ranks than 0; the CPUs of a machine
    share its memory, so that all ranks run at once."""
    device = default_device()
    if dist.get_rank() != 0 and device.type == "cuda":
        return [], ""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    found: list[Timed] = []
    previous: tuple[_Case, float] | None = None
    try:
        with torch.no_grad():
            for case in _CASES[kind](device, dtype, largest):
                if previous is not None and previous[1] * _work(case) / _work(previous[0]) > SLOWEST_S:
                    break
                run, start, cpu_start = case.make(), time.perf_counter(), time.thread_time()
                best_s, median_s = timed(run, device)
                share = (time.thread_time() - cpu_start) / (time.perf_counter() - start)
                previous = case, best_s
                timing = OperatorTime(
                    op_class=case.op_class, flops=case.flops, bytes_moved=case.bytes_moved, dtype=case.dtype, measured_s=median_s,
                    written=case.written,
                )  # fmt: skip
                found.append(Timed(kind=kind, what=case.what, timing=timing, best_s=best_s, cpu_share=share))
    except REFUSALS as error:
        return found, f"{kind} in {dtype}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        torch.set_float32_matmul_precision(precision)
    return found, ""


def _work(case: _Case) -> float:
    return case.flops or case.bytes_moved


def _matmul(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    made = _torch_dtype(dtype)
    side = 64
    while side <= largest:

        def make(n: int = side) -> Run:
            a, b = (torch.rand(n, n, device=device).to(made) for _ in range(2))
            return lambda: torch.mm(a, b)

        result = 1.0 * side**2 * made.itemsize
        yield _Case(
            what=f"product of {side} x {side}", op_class="matmul", dtype=dtype, flops=2.0 * side**3, bytes_moved=3 * result,
            written=result, make=make,
        )  # fmt: skip
        side *= 2


def _layers(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    """The three products of a linear layer with many tokens and few channels. Activations come from memory, as in a model."""
    made = _torch_dtype(dtype)
    for width in (n for n in (128, 256, 512) if n <= largest):
        tokens, channels = 8 * width, 4 * width
        nbytes = tokens * (width + channels) * made.itemsize
        copies = max(1, STREAMED_BYTES[device.type] // nbytes)
        for what, run in _OF_A_LAYER.items():

            def make(run: _Product = run, tokens: int = tokens, width: int = width, channels: int = channels, copies: int = copies) -> Run:
                pairs = itertools.cycle([
                    (torch.rand(tokens, width, device=device).to(made), torch.rand(tokens, channels, device=device).to(made))
                    for _ in range(copies)
                ])  # fmt: skip
                weight = torch.rand(channels, width, device=device).to(made)
                return lambda: run(weight, *next(pairs))

            moved = float(nbytes + channels * width * made.itemsize)
            yield _Case(
                what=f"{what} of a layer from {width} to {channels} channels, {tokens} tokens", op_class="matmul", dtype=dtype,
                flops=2.0 * tokens * width * channels, bytes_moved=moved, written=1.0 * tokens * channels * made.itemsize, make=make,
            )  # fmt: skip


_Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]  # of a weight, what enters the layer, a gradient of what leaves it
_OF_A_LAYER: dict[str, _Product] = {
    "result": lambda weight, x, _: F.linear(x, weight),
    "gradient of the operand": lambda weight, _, gradient: gradient @ weight,
    "gradient of the weight": lambda _, x, gradient: gradient.t() @ x,
}


def _images(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    """Convolutions that enter and leave images of three colours."""
    made, batch, side = _torch_dtype(dtype), 8, 64
    for ins, outs in ((3, 32), (32, 3)):

        def make(ins: int = ins, outs: int = outs) -> Run:
            x, weight = torch.rand(batch, ins, side, side, device=device).to(made), torch.rand(outs, ins, 3, 3, device=device).to(made)
            return lambda: F.conv2d(x, weight, padding=1)

        pixels, result = batch * side**2, 1.0 * batch * side**2 * outs * made.itemsize
        moved = result + 1.0 * pixels * ins * made.itemsize
        yield _Case(
            what=f"convolution 3 x 3, {ins} to {outs} channels of {side} x {side}", op_class="conv", dtype=dtype,
            flops=18.0 * pixels * ins * outs, bytes_moved=moved, written=result, make=make,
        )  # fmt: skip


def _depthwise(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    made = _torch_dtype(dtype)
    for batch, channels, length in ((8, 128, 128), (8, 256, 256)):

        def make(batch: int = batch, channels: int = channels, length: int = length) -> Run:
            x, weight = torch.rand(batch, channels, length, device=device).to(made), torch.rand(channels, 1, 4, device=device).to(made)
            return lambda: F.conv1d(x, weight, groups=channels)

        numbers = 1.0 * batch * channels * length
        what = f"convolution of {channels} channels by themselves, {length} long"
        yield _Case(what=what, op_class="other", dtype=dtype, flops=8 * numbers, bytes_moved=2 * numbers * made.itemsize, make=make)


def _attention(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    made, heads, width = _torch_dtype(dtype), 8, 64
    for length in (n for n in (128, 512, 1024, 2048, 4096) if n <= largest):
        for causal in (False, True):
            shape = (1 if device.type == "cpu" else 8, heads, length, width)

            def make(shape: tuple[int, ...] = shape, causal: bool = causal) -> Run:
                q, k, v = (torch.rand(shape, device=device).to(made) for _ in range(3))
                return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal)

            share = 1.0 if not causal else causal_share(length) if device.type == "cpu" else 0.5
            flops = 4.0 * share * math.prod(shape) * length
            what = f"{'causal ' if causal else ''}attention over {length}"
            moved = 4.0 * math.prod(shape) * made.itemsize
            yield _Case(what=what, op_class="attention", dtype=dtype, flops=flops, bytes_moved=moved, make=make)


def _conv(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    made, batch = _torch_dtype(dtype), 2 if device.type == "cpu" else 64
    order = torch.contiguous_format if device.type == "cpu" else torch.channels_last  # without conversions, which are priced apart
    for channels, side, kernel in ((64, 28, 1), (64, 28, 3), (256, 14, 3), (64, 56, 3)):
        if channels * side > 16 * largest:
            continue

        def make(channels: int = channels, side: int = side, kernel: int = kernel) -> Run:
            x = torch.rand(batch, channels, side, side, device=device).to(made, memory_format=order)
            weight = torch.rand(channels, channels, kernel, kernel, device=device).to(made, memory_format=order)
            return lambda: F.conv2d(x, weight, padding=kernel // 2)

        pixels = batch * channels * side**2
        flops, moved = 2.0 * pixels * channels * kernel**2, (2.0 * pixels + (channels * kernel) ** 2) * made.itemsize
        what = f"convolution {kernel} x {kernel}, {channels} channels of {side} x {side}"
        result = 1.0 * pixels * made.itemsize
        yield _Case(what=what, op_class="conv", dtype=dtype, flops=flops, bytes_moved=moved, written=result, make=make)


def _streams(op_class: str, *operators: tuple[str, float, Streaming]) -> Callable[[torch.device, str, float], Iterator[_Case]]:
    """Operators on two matrices with rows of 1024. Each has a name, and how many matrices it moves; on a GPU as many as it is priced at."""

    def cases(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
        made = _torch_dtype(dtype)
        rows = _rows(device, made, largest)
        for what, passes, run in operators:

            def make(run: Streaming = run) -> Run:
                x, y = (torch.rand(rows, 1024, device=device).to(made) for _ in range(2))
                return lambda: run(x, y)

            over = AS_TIMED.get(what.replace(" ", "_")) if device.type != "cpu" else None
            moved = float((over.read + over.written if over else passes) * rows * 1024 * made.itemsize)
            yield _Case(what=f"{what} of {rows} x 1024", op_class=op_class, dtype=dtype, bytes_moved=moved, make=make)

    return cases


def _gather(device: torch.device, dtype: str, largest: float) -> Iterator[_Case]:
    made = _torch_dtype(dtype)
    rows = _rows(device, made, largest)
    for width in (256, 1024):

        def make(width: int = width) -> Run:
            table = torch.rand(rows, width, device=device).to(made)
            index = torch.randint(rows, (rows,), device=device)
            return lambda: F.embedding(index, table)

        moved = 2.0 * rows * width * made.itemsize + 8.0 * rows
        yield _Case(what=f"{rows} rows of {width} gathered", op_class="gather", dtype=dtype, bytes_moved=moved, make=make)


def _rows(device: torch.device, dtype: torch.dtype, largest: float) -> int:
    """Rows of 1024 elements that make up STREAMED_BYTES; fewer where only small operators are wanted."""
    return max(64, int(STREAMED_BYTES[device.type] * min(1.0, largest / 1024)) // dtype.itemsize // 1024)


_CASES: dict[str, Callable[[torch.device, str, float], Iterator[_Case]]] = {
    "matmul": _matmul,
    "layer": _layers,
    "attention": _attention,
    "conv": _conv,
    "image": _images,
    "depthwise": _depthwise,
    "pointwise": _streams(
        "pointwise",
        ("copy", 2, lambda x, _: x.clone()), ("sum of two", 3, lambda x, y: x + y), ("relu", 2, lambda x, _: torch.relu(x)),
        ("gelu", 2, lambda x, _: F.gelu(x)),
    ),
    "reduction": _streams(
        "reduction",
        ("sum", 1, lambda x, _: x.sum()), ("softmax", 2, lambda x, _: x.softmax(-1)),
        ("layer norm", 2, lambda x, _: F.layer_norm(x, x.shape[-1:])),
    ),
    "gather": _gather,
}  # fmt: skip


def timed(run: Run, device: torch.device) -> tuple[float, float]:
    """(best, median) seconds of one run among others like it, after a warm-up."""
    clock = time.thread_time if device.type == "cpu" else time.perf_counter

    def sample(loops: int) -> float:
        wait(device)
        start = clock()
        for _ in range(loops):
            run()
        wait(device)
        return (clock() - start) / loops

    single = firsts(sample)
    samples = repeated(sample, single, min(single), SAMPLE_S, MOST_LOOPS)
    return min(samples), statistics.median(samples)


def firsts(sample: Callable[[int], float], settled: Callable[[float], float] = lambda seconds: seconds) -> list[float]:
    """Single runs after a warm-up: several, because one alone may have been held up, but one if it takes long. settled: of what a
    rank measured, what all ranks go by."""
    warm_up_s = settled(sample(1))
    return [sample(1) for _ in range(FIRSTS if warm_up_s < CASE_S else 1)]


def repeated(sample: Callable[[int], float], single: list[float], once: float, sample_s: float, most_loops: int) -> list[float]:
    """Samples of about sample_s each, REPEATS of them or as many as CASE_S allows. single: what single runs took, once: of them the
    usual."""
    loops = min(most_loops, max(1, math.ceil(sample_s / once)))
    kept = single if loops == 1 else []
    wanted = min(REPEATS, max(len(single), int(CASE_S / (once * loops))))
    return kept + [sample(loops) for _ in range(wanted - len(kept))]


def _torch_dtype(dtype: str) -> torch.dtype:
    return torch.float32 if dtype == "tf32" else getattr(torch, dtype)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
