"""A plan, or a sweep, as one HTML file that needs no network; and a plan's timeline and memory as SVG."""

from autopar.report.page.page import page_of
from autopar.report.page.picture import svg_of, svg_of_sweep
from autopar.report.page.sweep import sweep_page

__all__ = ["page_of", "svg_of", "svg_of_sweep", "sweep_page"]
