"""The declared hooks on Megatron: a fingerprint and a reason for each."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import FunctionType

import pytest

pytest.importorskip("megatron.core")

from megatron_unickpt.framework.fingerprints import FINGERPRINTS
from megatron_unickpt.framework.versions import VERSIONS
from megatron_unickpt.hooks import DECLARED
from megatron_unickpt.measuring.timing import groups_hook, timing_hooks
from unickpt.base import hooks
from unickpt.base.hooks import Hook
from unickpt.base.options.job import TimingOptions


def test_every_hook_has_fingerprints_and_a_reason_of_its_own() -> None:
    declared = [*DECLARED, *timing_hooks(), groups_hook(TimingOptions())]
    assert all(hook.fingerprints for hook in declared)
    reasons = [hook.why for hook in declared]
    assert len(set(reasons)) == len(reasons), sorted(reason for reason in reasons if reasons.count(reason) > 1)
    assert {hook.name for hook in declared} == set(FINGERPRINTS)


def test_the_functions_that_hooks_import_at_their_first_call_exist() -> None:
    wrappers = [hook.wrapper for hook in DECLARED if isinstance(hook.wrapper, FunctionType)]
    named = [inspect.getclosurevars(wrapper).nonlocals for wrapper in wrappers]
    late = {(each["module"], each["name"]) for each in named if {"module", "name"} <= each.keys()}
    assert ("pretraining.scripts", "save_checkpoint") in late
    assert all(callable(getattr(import_module(f"megatron_unickpt.{module}"), name)) for module, name in late)


@pytest.mark.parametrize(("strict", "state"), [(True, "unverified"), (False, "installed")])
def test_an_unknown_source_is_noted_and_tested_for_a_strict_hook(strict: bool, state: str) -> None:
    hook = Hook(
        name="test", module="argparse", attribute="ArgumentParser.parse_args", wrapper=print, versions=VERSIONS,
        fingerprints=frozenset({"0" * 12}), why="", upstream="", until="", strict=strict,
    )  # fmt: skip
    found = hooks.examine(hook, "0.16.1")
    assert found.state == state
    assert "the source of ArgumentParser.parse_args is unknown" in found.reason
