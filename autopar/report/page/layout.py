"""The templates of pages, rendered by jinja2 with every text escaped; style, script and plotting library are in the file."""

from __future__ import annotations

import functools
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from autopar.report.page.vega import library_script
from autopar.report.strategies import operator_of
from autopar.report.units import bytes_text, count_text, seconds_text
from autopar.report.words import share_text

__all__ = ["rendered"]


def rendered(template: str, **values: Any) -> str:
    """The whole file of a template that extends layout.html. Raises LibraryMissing."""
    return _environment().get_template(template).render(
        **values, library=_script(library_script()), script=_script(_file("page.js")), style=Markup(_file("page.css"))
    )


def _script(text: str) -> Markup:
    """Code of ours and of the library inside of a script element, which it must not end."""
    return Markup(text.replace("</script", "<\\/script").replace("<!--", "<\\!--"))


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file), autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    made.filters |= {
        "seconds": seconds_text, "bytes": bytes_text, "count": count_text, "operator": operator_of, "percent": share_text,
    }  # fmt: skip
    return made
