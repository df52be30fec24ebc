"""Markdown extension of the site for the pages that include SECURITY.md and CHANGELOG.md.

Links of these files start at the root of the repository. The pages are one folder below ``docs``: ``docs/guides/x.md`` is
``../guides/x.md`` there. No other page has links that start with ``docs/``.
"""

from __future__ import annotations

from markdown import Extension, Markdown
from markdown.preprocessors import Preprocessor

_AFTER_SNIPPETS = 31  # pymdownx.snippets has 32, and what is greater runs first


class _FromTheRoot(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        return [line.replace("](docs/", "](../").replace("](SECURITY.md", "](security.md") for line in lines]


class SiteLinks(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.preprocessors.register(_FromTheRoot(md), "site_links", _AFTER_SNIPPETS)


def makeExtension(**options: object) -> SiteLinks:  # noqa: N802
    """Return the extension: Markdown calls this by its name."""
    return SiteLinks(**options)
