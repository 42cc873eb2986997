"""Ways in which people write models, and not what torch's own documentation does."""

from __future__ import annotations

import warnings
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from benchmarks._traps_kit import (
    CLASSES,
    HIDDEN,
    WIDTH,
    Block,
    Compile,
    Net,
    Results,
    batch,
    program,
    seeded,
    trained,
)

KIND = "idioms"
MORE = ("dp2mb2", "dp2tp2", "hybrid3")


def _results(compile: Compile, model: type[nn.Module]) -> Results:
    compiled = compile(seeded(model), example_inputs=batch())
    return trained(compiled, torch.optim.AdamW(compiled.parameters(), lr=1e-2))


@program(KIND, plans=MORE)
def checkpointed_as_ever(compile: Compile) -> Results:
    """torch.utils.checkpoint with use_reentrant=True around each block."""

    class Again(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x))
            for block in self.blocks:
                h = checkpoint(block, h, use_reentrant=True)
            return h

    return _results(compile, Again)


@program(KIND, plans=MORE)
def checkpointed_without_a_gradient(compile: Compile) -> Results:
    """The same around the first layer, whose input needs no gradient: torch gives its weights none."""

    class Again(Net):
        def hidden(self, x: Tensor) -> Tensor:
            return self.blocks(torch.tanh(checkpoint(self.first, x, use_reentrant=True)))

    return _results(compile, Again)


@program(KIND, plans=MORE)
def checkpointed_in_segments(compile: Compile) -> Results:
    """checkpoint_sequential, and a part that draws random numbers inside."""

    class Again(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = checkpoint_sequential(self.blocks, 2, torch.tanh(self.first(x)), use_reentrant=False)
            return checkpoint(partial(F.dropout, p=0.0), h, use_reentrant=False)

    return _results(compile, Again)


class _Routed(nn.Module):
    """Each sample goes through one of three layers, by its values: torch.export cannot trace it, so that it runs as it is written."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 3)
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().squeeze(-1)
            out[rows] = weight[rows, None] * checkpoint(expert, x[rows], use_reentrant=self.reentrant)
        return x + out


@program(KIND, plans=MORE)
def checkpointed_inside_of_a_region(compile: Compile) -> Results:
    """Routed layers that run again in backward."""

    class Experts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(_Routed(False), Block())

    return _results(compile, Experts)


@program(KIND, plans=MORE)
def checkpointed_as_ever_inside_of_a_region(compile: Compile) -> Results:
    """The same with use_reentrant=True."""

    class Experts(Net):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(_Routed(True), Block())

    return _results(compile, Experts)


@program(KIND, plans=MORE)
def functions_that_close_over_the_model(compile: Compile) -> Results:
    """As minGPT writes it: self.mlpf = lambda x: self.proj(self.act(self.fc(x)))."""

    class Lambda(Net):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.ModuleDict({"fc": nn.Linear(HIDDEN, HIDDEN), "act": nn.GELU(), "proj": nn.Linear(HIDDEN, HIDDEN)})
            mlp = self.mlp
            self.mlpf = lambda x: mlp.proj(mlp.act(mlp.fc(x)))

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            return h + self.mlpf(h)

    return _results(compile, Lambda)


@program(KIND, plans=MORE)
def weight_norm_as_ever(compile: Compile) -> Results:
    """torch.nn.utils.weight_norm, whose weight is a plain attribute that a hook computes before each call."""

    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # there is another one now, in nn.utils.parametrizations
                self.first = nn.utils.weight_norm(nn.Linear(WIDTH, HIDDEN))

    return _results(compile, Normed)


@program(KIND, plans=MORE)
def modes_of_a_spectrum(compile: Compile) -> Results:
    """A Fourier layer: complex weights on some frequencies, written into zeros."""

    class Fourier(Net):
        def __init__(self) -> None:
            super().__init__()
            self.modes = nn.Parameter(torch.randn(HIDDEN // 4, HIDDEN // 4, dtype=torch.get_default_dtype().to_complex()) / 4)

        def hidden(self, x: Tensor) -> Tensor:
            h = super().hidden(x)
            spectrum = torch.fft.rfft(h)
            kept = torch.zeros_like(spectrum)
            kept[:, : HIDDEN // 4] = torch.einsum("bi,io->bo", spectrum[:, : HIDDEN // 4], self.modes)
            kept[:, -1] = spectrum[:, -1] * 0.5
            return h + torch.fft.irfft(kept, n=HIDDEN)

    return _results(compile, Fourier)


@program(KIND, plans=MORE)
def samples_in_a_python_loop(compile: Compile) -> Results:
    """The batch is walked sample by sample, and the results are stacked."""

    class Loop(Net):
        def logits(self, x: Tensor) -> Tensor:
            return torch.stack([self.head(self.hidden(x[k : k + 1])).amax(0) for k in range(x.size(0))])

    return _results(compile, Loop)


@program(KIND, plans=MORE)
def losses_collected_in_a_list(compile: Compile) -> Results:
    """Deep supervision: each block has a head, their losses are appended to a list of the module's and summed by the loop of forward."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(HIDDEN, CLASSES) for _ in range(2))
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.losses.clear()
            h = torch.tanh(self.first(x))
            for k, (block, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
                h = block(h)
                self.losses.append(0.5**k * F.cross_entropy(head(h), y))
            total = sum(self.losses, F.cross_entropy(self.head(h), y))
            assert isinstance(total, Tensor)
            return total

    return _results(compile, Deep)


@program(KIND)
def tried_before_it_is_done_otherwise(compile: Compile) -> Results:
    """A view that there is none of, and a sum that shapes do not allow: caught, and done in another way."""

    class Trying(Net):
        def hidden(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.first(x)).t()
            try:
                h = h.view(x.shape[0], -1)
            except RuntimeError:
                h = h.reshape(-1, x.shape[0]).t()
            try:
                h = h + torch.ones(HIDDEN + 1, dtype=h.dtype)
            except RuntimeError:
                h = h + 0.5
            found: Tensor = self.blocks(h)
            return found

    return _results(compile, Trying)
