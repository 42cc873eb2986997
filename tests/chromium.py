"""A page in headless Chromium: what a script of the test finds out in it, what it logs, and how long it takes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Visited", "browser", "visit"]

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BUDGET_MS = 20_000  # of the page's own clock, which does not go on while the machine is busy with something else
_MARK = "autopar-test-result"


@dataclass(frozen=True, kw_only=True, slots=True)
class Visited:
    """result: what the script returned; errors: what the console says is one."""

    result: Any
    errors: tuple[str, ...]


def browser() -> str:
    """Its program; the test is skipped where there is none."""
    found = next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed ({', '.join(NAMES)}): apt-get install chromium")
    return found


def visit(page: str, script: str, folder: Path, *, width: int = 1200, height: int = 900) -> Visited:
    """Open a page and run the body of an asynchronous function in it. Narrow widths are those of a frame: a window has a least one."""
    run = f"""<script>addEventListener("load", async () => {{
        const wait = (ms) => new Promise((done) => setTimeout(done, ms));
        const whole = async () => {{ while (!document.documentElement.dataset.drawn) await wait(50); }};  // all charts are drawn
        let said;
        try {{ said = await (async () => {{ {script} }})(); }}
        catch (error) {{ said = {{ failed: String(error && error.stack || error) }}; }}
        const mark = document.createElement("pre"); mark.id = "{_MARK}"; mark.textContent = JSON.stringify(said);
        (window.parent || window).document.body.append(mark);
    }});</script>"""
    target = folder / "page.html"
    before, _, _ = page.rpartition("</body>")
    target.write_text(f"{before}{run}</body></html>", encoding="utf-8")
    if width < 500:
        frame = f"<iframe src='page.html' style='border:0;width:{width}px;height:{height}px'></iframe>"
        target = folder / "frame.html"
        target.write_text(f"<!doctype html><body style='margin:0'>{frame}</body>", encoding="utf-8")
    command = [
        browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--allow-file-access-from-files", "--enable-logging=stderr", "--v=0",
        f"--virtual-time-budget={BUDGET_MS}", f"--window-size={max(width, 500)},{height}", f"--user-data-dir={folder / 'profile'}",
        "--dump-dom", target.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found = re.search(rf'<pre id="{_MARK}">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the script has not ended:\n{done.stderr[-3000:]}"
    text = found[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    errors = tuple(line for line in logged if re.search(r"error|uncaught|refused|violat", line, re.IGNORECASE))
    return Visited(result=json.loads(text), errors=errors)
