"""A real browser without a window: what a page becomes, and whether it fits a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed to open the page with")
PHONE_PIXELS = 390

_WIDTHS = """<!doctype html><body><pre id="result"></pre><script>
const pages = %s, width = %d, frame = document.createElement("iframe"), wide = [];
frame.style.width = `${width}px`; frame.style.height = "844px"; document.body.append(frame);
let at = -1;
const next = () => {
  if (++at < pages.length) frame.src = pages[at];
  else document.getElementById("result").textContent = `measured ${pages.length} ` + JSON.stringify(wide);
};
frame.onload = () => setTimeout(() => {
  const { scrollWidth } = frame.contentDocument.documentElement;
  if (scrollWidth > width) wide.push([pages[at], scrollWidth]);
  next();
}, 20);
next();
</script>"""


def drawn(page: Path, profile: Path, *flags: str, milliseconds: int = 3000) -> subprocess.CompletedProcess[str]:
    """Open a page and return its elements as text, after so much of its own time, and the browser's log."""
    command = [
        str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run",
        "--v=0", "--enable-logging=stderr", "--dump-dom", f"--user-data-dir={profile}", f"--virtual-time-budget={milliseconds}",
        *flags, page.as_uri(),
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def wider_than_a_phone(folder: Path, pages: list[str], profile: Path) -> list[tuple[str, int]]:
    """Return the pages below a folder that scroll sideways at 390 pixels, with the width of each in pixels."""
    measure = folder / "measure-widths.html"
    measure.write_text(_WIDTHS % (json.dumps(pages), PHONE_PIXELS))
    done = drawn(measure, profile, "--allow-file-access-from-files", milliseconds=600_000)
    measure.unlink()
    found = re.search(rf"measured {len(pages)} (\[.*?\])</pre>", done.stdout)
    assert found, (done.stdout[-2000:], done.stderr[-2000:])
    return [(str(page), int(width)) for page, width in json.loads(found[1])]
