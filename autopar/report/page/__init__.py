"""A plan as one HTML file that needs no network, and its timeline and memory as SVG."""

from autopar.report.page.page import page_of
from autopar.report.page.picture import svg_of

__all__ = ["page_of", "svg_of"]
