"""A line appears once, and has the name of the package once, whatever the program does with logging."""

from __future__ import annotations

import pytest

from tests.support.cli import python

MEGATRON = "logging.basicConfig(level=logging.INFO, stream=sys.stderr)"  # as its training.py does: the format has the name
SEVERAL = (
    "logging.basicConfig(level=logging.INFO, stream=sys.stderr, format='%(name)s | %(message)s')\n"
    "logging.getLogger('unickpt').addHandler(logging.FileHandler('/dev/null'))"
)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("", "", "unickpt: resumed"),
        (MEGATRON, "", "INFO:unickpt:resumed"),
        ("", MEGATRON, "INFO:unickpt:resumed"),
        (MEGATRON, MEGATRON, "INFO:unickpt:resumed"),
        ("logging.basicConfig(level=logging.WARNING, format='%(message)s')", "", "unickpt: resumed"),
        ("logging.basicConfig(format='{levelname} {name} {message}', style='{')", "", "INFO unickpt resumed"),
        ("logging.getLogger('DeepSpeed').addHandler(logging.StreamHandler())", "", "unickpt: resumed"),
        ("logging.getLogger().addHandler(logging.NullHandler())", "", "unickpt: resumed"),
        (SEVERAL, "", "unickpt | unickpt: resumed"),  # a handler whose format has no name shows the message
    ],
)
def test_a_line_appears_once_with_the_name_once(before: str, after: str, expected: str) -> None:
    program = (
        "import logging, sys\n"
        f"{before}\n"
        "from unickpt.base.logs import make_visible\n"
        "make_visible()\n"
        f"{after}\n"
        "make_visible()\n"
        "logging.getLogger('unickpt').info('unickpt: resumed %s', 'it')\n"
        "logging.getLogger('unickpt').debug('unickpt: a detail')\n"
    )
    lines = python("-c", program).stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].endswith(f"{expected} it")
    assert lines[0].partition("] ")[2] == f"{expected} it" if lines[0].startswith("[") else lines[0] == f"{expected} it"


def test_a_warning_before_anything_is_configured_has_the_name() -> None:
    program = (
        "import logging\n"
        "import unickpt.base.logs\n"
        "logging.getLogger('unickpt').warning('unickpt: a save failed')\n"
        "logging.getLogger('unickpt').info('unickpt: a detail')\n"
    )
    assert python("-c", program).stderr == "unickpt: a save failed\n"
