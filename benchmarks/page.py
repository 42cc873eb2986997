"""How long a browser takes for the HTML page of a plan of 96 layers on 1,024 GPUs, from navigation until every chart is drawn.

    python -m benchmarks page [--visits N] [--model NAME] [--gpus N]

The plan is that of GPT-3 175B (benchmarks._planned); the page is written once and opened by a new headless Chromium for each visit. The
time is the page's own (performance.now when the last chart is drawn, which counts from the start of the navigation), of the wall: whatever
else runs on the machine is in it, so run nothing beside it. Pins keep the planning short; they do not change what the page has to draw.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

MARK = "page drawn after"
WATCH = f"""<script>(() => {{
  const timer = setInterval(() => {{
    const ms = document.documentElement.dataset.drawn;
    if (ms) {{ clearInterval(timer); console.log("{MARK} " + ms + " ms"); }}
  }}, 20);
}})();</script>"""


def main(argv: list[str]) -> int:
    asked = argparse.ArgumentParser(prog="python -m benchmarks page", description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--visits", type=int, default=5)
    asked.add_argument("--model", default="gpt3-175b")
    asked.add_argument("--gpus", type=int, default=1024)
    options = asked.parse_args(argv)
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium is installed: apt-get install chromium")
        return 1
    text = _page(options.model, options.gpus)
    with tempfile.TemporaryDirectory() as folder:
        times = [_visit(browser, text, Path(folder) / f"{k}") for k in range(options.visits)]
    seen = [ms for ms in times if ms is not None]
    found = {
        "model": options.model, "gpus": options.gpus, "bytes": len(text.encode()), "drawn_ms": seen, "not_drawn": len(times) - len(seen),
        "median_ms": statistics.median(seen) if seen else None, "load": os.getloadavg()[0],
    }  # fmt: skip
    print(f"{options.model} on {options.gpus} GPUs: {found['bytes'] / 2**20:.2f} MiB")
    print(f"ms from navigation until all was drawn: {', '.join(map(str, seen)) or 'none was drawn'}; load {found['load']:.1f}")
    print(json.dumps(found))
    return 0 if seen else 1


def _page(name: str, gpus: int) -> str:
    from autopar.capture import capture
    from autopar.measure import Pricer
    from autopar.planner import Pins, lower, make_plan
    from autopar.render import make_manifest, render_linked
    from autopar.report.explanation import explanation_of
    from autopar.report.page import page_of
    from autopar.report.page.page import Emitted
    from benchmarks._planned import MODELS, build
    from cost_models import load_cluster

    model = MODELS[name]
    program = capture(*build(model)).program
    cluster = load_cluster(model.cluster)
    plan = make_plan(program, gpus, cluster, pins=Pins(pp=16, tp=8, micro_batch=1, zero=1))
    lowered = lower(program, plan)
    source, lines = render_linked(lowered, make_manifest(program, lowered, plan))
    costs = Pricer(cluster, plan.mesh).program(lowered.program).ops
    return page_of(plan, explanation_of(plan), emitted=Emitted(source=source, lines=lines, costs=costs, program=program))


def _visit(browser: str, text: str, folder: Path, patience_s: float = 120.0) -> int | None:
    """Milliseconds, None where the page was not drawn in all this time."""
    folder.mkdir()
    target, said = folder / "page.html", folder / "said"
    before, _, after = text.rpartition("</body>")
    target.write_text(f"{before}{WATCH}</body>{after}", encoding="utf-8")
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--window-size=1280,900")
    with said.open("wb") as log:
        running = subprocess.Popen(
            [browser, *flags, "--remote-debugging-port=0", f"--user-data-dir={folder / 'profile'}", target.as_uri()],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            end = time.monotonic() + patience_s
            while time.monotonic() < end and running.poll() is None:
                if found := re.search(rf"{MARK} (\d+) ms", said.read_text(errors="replace")):
                    return int(found[1])
                time.sleep(0.1)
        finally:
            running.terminate()
            running.wait(timeout=30)
    return None
