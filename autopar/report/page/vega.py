"""The plotting library: Vega and Vega-Lite (BSD-3-Clause), as the package vl-convert-python has them inside: for pages as one script, for
pictures as a renderer that needs no browser. Charts are Vega-Lite specifications, the same ones for both."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from autopar.errors import AutoparError
from autopar.files import OutputError, write_file
from autopar.plan_cache import cache_folder

__all__ = ["LibraryMissing", "library_script", "picture", "vega_of"]


class LibraryMissing(AutoparError, ImportError):
    """vl-convert-python is not installed."""


def _vl_convert() -> Any:
    try:
        return importlib.import_module("vl_convert")
    except ImportError as error:
        raise LibraryMissing(
            "pages and pictures are drawn by Vega-Lite, from the package vl-convert-python, which is not installed: "
            "pip install vl-convert-python (text, JSON and Perfetto traces need nothing)"
        ) from error


def _newest(made: Any) -> str:
    """The newest Vega-Lite that the package has."""
    return str(made.get_vegalite_versions()[-1])


def library_script() -> str:
    """Vega, Vega-Lite and Vega-Embed as one script, which sets window.vegaEmbed. It is bundled once for each version and kept."""
    made = _vl_convert()
    folder = cache_folder()
    entry = None if folder is None else folder.parent / f"vega-{made.__version__}.js"
    if entry is not None:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            kept = entry.read_text(encoding="utf-8")
            if kept.rstrip().endswith(_END):
                return kept
    script = f"{made.javascript_bundle(vl_version=_newest(made))}\n{_END}\n"
    if entry is not None:
        with contextlib.suppress(OSError, OutputError):
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_file(entry, script.encode())
    return script


_END = "/* the whole of vega, vega-lite and vega-embed */"


def vega_of(spec: dict[str, Any]) -> dict[str, Any]:
    """A Vega-Lite specification compiled to Vega, so that the page need not do it. The background is the page's."""
    made = _vl_convert()
    found: dict[str, Any] = made.vegalite_to_vega(spec, vl_version=_newest(made))
    return {key: value for key, value in found.items() if key != "background"}


def picture(spec: dict[str, Any]) -> str:
    """As SVG."""
    made = _vl_convert()
    text: str = made.vegalite_to_svg(spec, vl_version=_newest(made))
    return text
