"""The docs: links lead somewhere, the site builds without a warning, its search prefers guides, pages fit on a phone."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.support.browser import needs_browser, wider_than_a_phone
from tests.support.repository import REPO
from unickpt.testing.launch import environment

DOCS, SITE = REPO / "docs", REPO / "build" / "site"
ROOT_PAGES = [REPO / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "changes/README.md")]

# What users type, and the page that the search must show first.
QUERIES = {
    "resume with fewer GPUs": "guides/deepspeed/",
    "resume on another number of GPUs": "guides/deepspeed/",
    "install": "start/install/",
    "uninstall": "help/operations/",
    "convert deepspeed checkpoint": "guides/conversion-deepspeed/",
    "convert megatron checkpoint": "guides/conversion-megatron/",
    "which rank hangs": "guides/diagnosis/",
    "slow rank": "guides/diagnosis-how/",
    "nccl timeout": "troubleshooting/frameworks/",
    "dp world size": "troubleshooting/frameworks/",
    "bus error shared memory": "troubleshooting/frameworks/",
    "vllm 4 bits": "guides/quantised/",
    "merge lora": "guides/editing/",
    "save to s3": "guides/object-stores/",
    "keep global batch": "guides/deepspeed-batch/",
    "trainer resume_from_checkpoint": "guides/huggingface/",
    "host fails spare": "guides/steering/",
    "slurm": "guides/my-job-on-64-hosts/",
    "slurm kubernetes": "recipes/slurm-kubernetes/",
    "wheelhouse": "recipes/offline/",
    "install without network": "recipes/offline/",
    "serve adapters vllm": "recipes/lora-to-vllm/",
    "larger model from a trained one": "guides/growing/",
    "checkpoints in memory": "guides/memory/",
    "powersgd": "guides/compression/",
    "supported versions": "start/compatibility/",
    "save_checkpoint": "reference/api/saving-and-loading/",
    "no space left": "troubleshooting/saving/",
    "out of memory": "troubleshooting/memory/",
    "corrupted checkpoint": "troubleshooting/loading/",
    "fault tolerance": "guides/steering/",
    "overhead": "help/faq/",
    "report a bug": "troubleshooting/",
    "glossary": "help/glossary/",
    "faq": "help/faq/",
    "operations daily": "help/operations/",
    "upgrade": "help/operations/",
}


def _prose(page: Path) -> str:
    return re.sub(r"^```.*?^```|`[^`\n]+`", "", page.read_text(), flags=re.M | re.S)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page of Markdown, with those of its API and of a page that it includes."""
    text = re.sub(r'^--8<-- "(\w+\.md)"$', lambda include: (REPO / include[1]).read_text(), page.read_text(), flags=re.M)
    found: set[str] = set(re.findall(r'id="([^"]+)"', text)) | set(re.findall(r"^::: (\S+)", text, re.M))
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.M):
        words = re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading)).strip().lower()
        slug, number = re.sub(r"[-\s]+", "-", words), 1
        while slug in found:
            slug, number = re.sub(r"_\d+$", "", slug) + f"_{number}", number + 1
        found.add(slug)
    return found


def _links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Yield the links of a page of Markdown into this repository: text, file, anchor."""
    for link in re.findall(r"\]\(([^)\s]+)\)", _prose(page)):
        if not urlsplit(link).scheme:
            path, _, anchor = unquote(link).partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", [*ROOT_PAGES, *sorted(DOCS.rglob("*.md"))], ids=lambda page: str(page.relative_to(REPO)))
def test_links_lead_somewhere(page: Path) -> None:
    """Those that leave this repository are not fetched."""
    dead = [
        link for link, file, anchor in _links(page)
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in _anchors(file))
    ]  # fmt: skip
    assert not dead


def test_every_page_is_in_the_navigation_and_exists() -> None:
    text = (REPO / "mkdocs.yml").read_text()
    named = re.findall(r"([\w/-]+\.md)$", text[text.index("\nnav:") :], re.M)
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.fixture(scope="module")
def site() -> Path:
    if find_spec("zensical") is None:
        pytest.skip("not installed: zensical")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, env=environment(REPO))
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return SITE


class _Page(HTMLParser):
    """The links, pictures and anchors of a page that the generator has made."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids, self.targets = set[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        self.targets += [value for name in ("href", "src") if (value := values.get(name))]


def test_the_site_has_no_dead_link(site: Path) -> None:
    """Strict mode does not look at pictures, and not into files that a page includes."""
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    dead = []
    for path, page in pages.items():
        for target in page.targets:
            url = urlsplit(target)
            if url.scheme or url.netloc:
                continue
            file = (path.parent / unquote(url.path)).resolve() if url.path else path
            file = file / "index.html" if file.is_dir() else file
            if not file.exists() or (url.fragment and file in pages and unquote(url.fragment) not in pages[file].ids):
                dead.append(f"{path.relative_to(site)}: {target}")
    assert not dead
    assert len(pages) >= 80


def test_the_search_prefers_guides(site: Path) -> None:
    """Runs the code of the site's own search."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("not installed: node")
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    command = [node, "tests/jobs/site_search.js", str(site / "search.json"), str(worker), *QUERIES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=120)
    assert done.returncode == 0, done.stderr
    found = dict(zip(QUERIES, map(json.loads, done.stdout.splitlines()), strict=True))
    first = {query: places[0].partition("#")[0] if places else "" for query, places in found.items()}
    wrong = {query: found[query][:4] for query in QUERIES if first[query] != QUERIES[query]}
    assert not wrong
    everywhere = {item["location"].partition("#")[0] for item in json.loads((site / "search.json").read_text())["items"]}
    assert {page for page in everywhere if page.startswith(("evidence/", "developing/"))} == {"evidence/"}


@needs_browser
def test_no_page_scrolls_sideways_on_a_phone(site: Path, tmp_path: Path) -> None:
    """Wide tables and code scroll inside their box."""
    pages = [str(path.relative_to(site)) for path in sorted(site.rglob("index.html"))]
    assert wider_than_a_phone(site, pages, tmp_path / "profile") == []


def _messages() -> list[tuple[str, str]]:
    """Return what the pages of troubleshooting quote of unickpt: page and text. The messages of frameworks are theirs."""
    quoted = []
    for page in sorted((DOCS / "troubleshooting").glob("*.md")):
        if page.name not in ("index.md", "frameworks.md"):
            for row in re.findall(r"^\| (`.*)", page.read_text(), re.M):
                message, meaning = row.split(" | ")[:2]
                quoted += [(page.name, text) for text in re.findall(r"`([^`]+)`", message)]
                quoted += [(page.name, text) for text in re.findall(r"`([^`]+)`", meaning) if text.count(" ") > 2]
    return quoted


def _fixed(text: str) -> list[str]:
    """Return the parts of a quoted message that are not for values, which are words in capitals."""
    return [part.strip() for part in re.split(r"\b[A-Z][A-Z0-9]+\b", text) if len(part.strip()) > 5]


def _templates(node: ast.AST) -> str | None:
    """Return a text of the code, with a zero byte where a value goes."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[-.\d]*[a-z]", "\0", node.value)
    return None


def _nodes() -> Iterator[ast.AST]:
    for package in ("unickpt", "ds_unickpt", "megatron_unickpt", "torch_unickpt"):
        for path in sorted((REPO / package).rglob("*.py")):
            yield from ast.walk(ast.parse(path.read_text()))


def test_quoted_messages_exist() -> None:
    code = "\n".join(filter(None, map(_templates, _nodes())))
    gone = [(page, text, part) for page, text in _messages() for part in _fixed(text) if part not in code]
    assert not gone
    assert len(_messages()) > 150


def test_every_message_of_the_log_is_explained() -> None:
    """A warning or error belongs into a table of ``docs/troubleshooting``, with what to do about it."""
    known = [part for _, text in _messages() if len(part := max(_fixed(text), key=len, default="")) > 5]
    unknown = []
    for node in _nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("warning", "error"):
            text = _templates(node.args[0]) if node.args and ast.unparse(node.func.value) == "logger" else None
            if text and len(max(text.split("\0"), key=len)) > 20 and not any(part in text for part in known):
                unknown.append(text)
    assert not unknown
