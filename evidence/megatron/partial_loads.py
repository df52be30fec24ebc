"""All loads of ``tests/jobs/megatron/partial_loads.py``, as a section of a page.

python -m evidence.megatron.partial_loads --page docs/evidence/partial-loads.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path

from megatron_unickpt.testing.layouts import Layout
from tests.jobs.megatron.partial_loads import KINDS, TARGETS, WRAPPERS
from tests.support.forked_jobs import fork_ranks


def section(results: dict[str, list[str]], versions: str) -> str:
    """Return the section of the page: for every wrapper and kind, the cells without a problem of all cells."""
    lines = [f"| optimizer | {' | '.join(KINDS.values())} |", "|---|" + "---|" * len(KINDS)]
    for target in TARGETS:
        layout = Layout.parse(target)
        counts = []
        for kind in KINDS:
            names = [name for name in results if name.startswith(f"{kind} ") and name.endswith(f" {target}")]
            found = [results[name] for name in names]
            counts.append(f"{sum(not problems for problems in found)} of {len(found)}" if found else "-")
        lines.append(f"| {WRAPPERS[layout.optimizer]}, {target.rpartition('-')[0]} | {' | '.join(counts)} |")
    good = sum(not problems for problems in results.values())
    return "\n".join([f"{good} of {len(results)} cells without a difference. {versions}.", "", *lines])


def write_page(page: Path, text: str) -> None:
    """Replace the text between this half's marks."""
    begin, end = "<!-- megatron -->", "<!-- end of megatron -->"
    before, _, rest = page.read_text().partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", help="names of cells; default: all")
    parser.add_argument("--page", type=Path, help="write the section of this page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fork_ranks(2, "tests.jobs.megatron.partial_loads", folder, *given.cells, timeout_s=3600)
        results: dict[str, list[str]] = {}
        for file in sorted(Path(folder).glob("*/results.json"), key=lambda found: int(found.parent.name)):
            results |= json.loads(file.read_text())
    for name, problems in results.items():
        print(name, "equal" if not problems else problems[:4])
    if given.page:
        versions = f"megatron-core {version('megatron-core')}, PyTorch {version('torch')}, gloo on CPU"
        write_page(given.page, section(results, versions))


if __name__ == "__main__":
    main()
