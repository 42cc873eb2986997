"""What-if and why-not, from text: 'memory=40GiB', 'gpus=128', 'link.inter=25GB/s', 'tp=8'; and what they make of a question."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from autopar.axes import AXES
from autopar.explain.study import Asked
from autopar.planner.plan import Pins
from autopar.planner.resources import choose_cluster, parse_memory, whole_number
from autopar.planner.wishes import WishError, check_name
from autopar.report.units import in_own_unit
from autopar.targets import did_you_mean
from cost_models.cluster import Cluster
from cost_models.memory import OPTIMIZERS

__all__ = ["WHAT_IF", "parsed_pins", "pairs_of", "with_changes", "with_pins"]

WHAT_IF = ("memory", "gpus", "batch", "cluster", "optimizer", "link.inter", "link.intra")
LINKS = {"link.inter": "inter", "link.intra": "intra"}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)(B|b|bit|byte)(?:/s|ps)", re.IGNORECASE)
_SCALES = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def pairs_of(texts: Iterable[str], option: str) -> dict[str, str]:
    """['tp=8,pp=1', 'blocks=2,2'] to {'tp': '8', 'pp': '1', 'blocks': '2,2'}. WishError for what is none."""
    found: dict[str, str] = {}
    for text in texts:
        for part in re.split(r"[,\s]+(?=[A-Za-z_.]+\s*=)", text.strip()):
            name, equals, value = (x.strip() for x in part.partition("="))
            if not (name and equals and value):
                raise WishError(f"{option} {part!r} is not NAME=VALUE")
            if name in found:
                raise WishError(f"{option} {name} is given twice: {found[name]} and {value}")
            found[name] = value
    if not found:
        raise WishError(f"{option} is empty: NAME=VALUE is missing")
    return found


def parsed_pins(values: Mapping[str, str], option: str) -> dict[str, Any]:
    """Pins by name, checked. WishError, PlanError."""
    known = [name for name in dict.fromkeys((*Pins.__struct_fields__, *AXES)) if name != "axes"]
    for name in values:
        if name not in known:
            other = f"; --what-if {name}={values[name]} asks about it" if name in WHAT_IF else _near(name, known)
            raise WishError(f"{option} {name}={values[name]}: there is no pin {name!r}{other}")
    named = {name: value for name, value in values.items() if name in Pins.__struct_fields__}
    own: dict[str, Any] = {name: value.split(",") if name == "blocks" else value for name, value in named.items()}
    axes = {name: value for name, value in values.items() if name not in own}
    try:
        made = msgspec.convert({**own, **({"axes": axes} if axes else {})}, Pins, strict=False)
    except msgspec.ValidationError as error:
        raise WishError(f"{option} {', '.join(f'{k}={v}' for k, v in values.items())}: {error}") from error
    return {name: getattr(made, name) for name in (*own, *(("axes",) if axes else ()))}


def _near(name: str, known: Sequence[str]) -> str:
    """Near matches, or all there are."""
    return did_you_mean(name, known) or f"; there are {', '.join(dict.fromkeys(known))}"


def with_pins(asked: Asked, pins: Mapping[str, Any]) -> Asked:
    """With these pins in place of what was asked for under their names. A new size of one mesh axis leaves the others free."""
    stated = asked.pins
    if "micro_batch" in pins:
        stated = msgspec.structs.replace(stated, micro_batches=None)
    if "micro_batches" in pins:
        stated = msgspec.structs.replace(stated, micro_batch=None)
    return dataclasses.replace(asked, pins=msgspec.structs.replace(stated, **pins))


def with_changes(asked: Asked, changes: Mapping[str, str]) -> tuple[Asked, list[str]]:
    """The question with these changes, and what they are in words. WishError, UnknownHardware."""
    pins, said = {}, []
    known = [*WHAT_IF, *(name for name in Pins.__struct_fields__ if name != "axes"), *(axis for axis in AXES)]
    for name in sorted(changes, key=lambda name: name != "cluster"):
        value = changes[name]
        if name not in known:
            raise WishError(f"--what-if {name}={value}: there is nothing of this name to change{_near(name, known)}")
        if name not in WHAT_IF:
            pins[name] = value
            said.append(f"{name}={value}")
            continue
        asked, text = _changed(asked, name, value)
        said.append(text)
    if pins:
        asked = with_pins(asked, parsed_pins(pins, "--what-if"))
    return asked, said


def _changed(asked: Asked, name: str, value: str) -> tuple[Asked, str]:
    if name == "memory":
        try:
            limit = parse_memory(value)
        except ValueError as error:
            raise WishError(f"--what-if memory={value}: {error}") from error
        return dataclasses.replace(asked, memory_limit_bytes=limit), f"{' '.join(in_own_unit(limit or 0))} of memory a GPU"
    if name in ("gpus", "batch"):
        number = whole_number(value)
        if number is None:
            raise WishError(f"--what-if {name}={value[:100]}: needed is a positive whole number")
        if name == "gpus":
            return dataclasses.replace(asked, gpus=number), f"{number} GPUs"
        return dataclasses.replace(asked, batch=number), f"a batch of {number}"
    if name == "cluster":
        return dataclasses.replace(asked, cluster=choose_cluster(value)), f"GPUs of {value}"
    if name == "optimizer":
        check_name("optimizer", value, OPTIMIZERS)
        return dataclasses.replace(asked, optimizer=value), f"the optimizer {value}"
    return _with_link(asked, name, value)


def _with_link(asked: Asked, name: str, value: str) -> tuple[Asked, str]:
    which = LINKS[name]
    link = asked.cluster.inter if which == "inter" else asked.cluster.intra
    rate = _rate(name, value, link.bandwidth_bytes_per_s)
    faster: Cluster = dataclasses.replace(asked.cluster, **{which: dataclasses.replace(link, bandwidth_bytes_per_s=rate)})  # type: ignore[arg-type]
    count = asked.cluster.links_per_node if which == "inter" else asked.cluster.links_per_gpu
    where = f"between nodes ({count} out of a node)" if which == "inter" else f"inside the node ({count} out of a GPU)"
    text = f"links {where} of {rate / 1e9:.4g} GB/s each way, where they have {link.bandwidth_bytes_per_s / 1e9:.4g} GB/s"
    return dataclasses.replace(asked, cluster=faster), text


def _rate(name: str, value: str, now: float) -> float:
    """Bytes a second of '25GB/s', '200Gb/s' (bits), 'x2'."""
    if times := re.fullmatch(r"x(\d+(?:\.\d+)?)", value):
        rate = now * float(times[1])
    elif found := _RATE.fullmatch(value):
        base = 1024 if found[3] else 1000
        bits = found[4] == "b" or found[4].lower() == "bit"
        rate = float(found[1]) * base ** _SCALES[found[2].upper()] / (8 if bits else 1)
    else:
        raise WishError(f"--what-if {name}={value}: needed is a rate of one link in one direction, such as 25GB/s, 200Gb/s or x2")
    if rate <= 0:
        raise WishError(f"--what-if {name}={value}: a link must carry something")
    return rate
