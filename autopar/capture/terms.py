"""Is what a function returns a sum over its samples, or their mean, as a loss is? It runs on parts of them then, which are added.

It is tried as `samples` tries: whole and in parts, on what it was given and on variations of it. A mean over labels is one over those that
are not to be ignored; it is tried on batches of which some parts have few of these, or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar import generators
from autopar.capture.samples import FACTORS, Ran, Trial, close, differentiated, parts_of, splits_of, trial_of, variations
from autopar.run.region import Region
from autopar.run.region_modules import Applied, Terms, Weight

__all__ = ["as_terms"]

IGNORED = -100  # what torch and its like take for no label, if they are told nothing else


def as_terms(region: Region, given: Sequence[Tensor], results: Sequence[Tensor], *, draws: bool) -> tuple[Region, tuple[int, ...]]:
    """The region of a function that returns one number, as one whose results over parts of the samples are to be added, and which of its
    tensors are cut along dim 0 for that; the region itself and () if it is none."""
    if draws or len(results) != 1 or results[0].dim() or not results[0].requires_grad or not isinstance(region.module, Applied):
        return region, ()
    if results[0].dtype == torch.float16:  # which does not hold a sum
        return region, ()
    sizes = dict.fromkeys(t.shape[0] for t in given if t.dim() and t.shape[0] > 1 and t.dtype.is_floating_point)
    with generators.kept(), torch.enable_grad():
        trial = trial_of(region, given, ()) if sizes else None
        if trial is None:
            return region, ()
        for size in sizes:
            for split in splits_of(given, size):
                for weight in _weights(region, given, split):
                    if _adds_up(trial, split, size, weight):
                        return replace(region, module=Terms(region.module.function, weight)), split
    return region, ()


def _weights(region: Region, given: Sequence[Tensor], split: Sequence[int]) -> Iterator[Weight | None]:
    """By what the result for a part may count: nothing (it is a sum); its labels; its samples, if there are no labels of which it is not
    known which one would be ignored."""
    yield None
    labels = {k: _ignored(region, given[k]) for k in split if not given[k].dtype.is_floating_point}
    for k, found in labels.items():
        for ignored in found:
            yield Weight(k, ignored)
    if all(labels.values()):
        yield Weight(split[0])


def _ignored(region: Region, labels: Tensor) -> list[int]:
    """Labels that the function may be told to ignore. Any other number may be none that it takes."""
    if labels.dtype.is_floating_point or labels.dtype == torch.bool:
        return []
    told = [x for x in pytree.tree_leaves(region.arguments) if isinstance(x, int) and not isinstance(x, bool)]
    return [x for x in dict.fromkeys(told) if x == IGNORED or bool((labels == x).any())]


def _adds_up(trial: Trial, split: Sequence[int], size: int, weight: Weight | None) -> bool:
    tried, used = 0, False
    for tensors in _batches(trial, split, size):
        whole = differentiated(trial.region, tensors, (), None)
        if whole is None or not bool(whole[0][0].isfinite()):
            continue
        used = used or any(bool(whole[2][k].any()) for k in split)
        for factor in trial.factors(FACTORS):
            scaled = whole if factor == 1 else differentiated(trial.region, tensors, (), [g * factor for g in whole[1]])
            if scaled is None:
                return False
            for parts in parts_of(size) if factor == 1 else parts_of(size)[:1]:
                if not _same(trial, tensors, split, parts, weight, scaled):
                    return False
        tried += 1
    return tried > 1 and used


def _batches(trial: Trial, split: Sequence[int], size: int) -> Iterator[list[Tensor]]:
    """Variations, and such of which the first samples have no label."""
    yield from variations(trial.given)
    for k in split:
        for ignored in _ignored(trial.region, trial.given[k]):
            for without in {1, size // 3, size // 2}:
                labels = trial.given[k].clone()
                labels[:without] = ignored
                yield [*trial.given[:k], labels, *trial.given[k + 1 :]]


def _same(trial: Trial, tensors: Sequence[Tensor], split: Sequence[int], parts: int, weight: Weight | None, whole: Ran) -> bool:
    """As Terms and the graph behind it compute it: what parts give is multiplied by their weight, added, and divided by that of all."""
    assert isinstance(trial.region.module, Applied)
    region = replace(trial.region, module=Terms(trial.region.module.function, weight))
    of_all = 1.0 if weight is None else float(weight.of(tensors))
    (result,), (grad,), of_tensors, _ = whole
    found = []
    for k in range(parts):
        part = differentiated(region, [t.chunk(parts)[k] if i in split else t for i, t in enumerate(tensors)], (), [grad / of_all])
        if part is None:
            return False
        found.append(part)
    joined = [(torch.stack([p[0][0] for p in found]).sum() / of_all, result)]
    for k, g in enumerate(of_tensors):
        pieces = [p[2][k] for p in found]
        joined.append((torch.cat(pieces) if k in split else torch.stack(pieces).sum(0), g))
    scale = float(grad.abs()) or 1.0
    return all(close(a, b, 1e-2 * min(1.0, scale), trial.tolerance) for a, b in joined if b.dtype.is_floating_point)
