"""The declared hooks on DeepSpeed and transformers: a fingerprint and a reason for each."""

from __future__ import annotations

import pytest

pytest.importorskip("deepspeed")

from ds_unickpt import hooks as declarations
from ds_unickpt.framework.fingerprints import FINGERPRINTS
from ds_unickpt.framework.versions import version
from ds_unickpt.measuring.timing import all_timing_hooks
from unickpt.base import hooks

HOOKS = [*declarations.DECLARED, *all_timing_hooks()]
REPLACE_A_RESULT = {
    "deepspeed.compression.bucket", "deepspeed.compression.zero", "deepspeed.compression.engine",
    "deepspeed.configure", "deepspeed.batch", "deepspeed.save", "deepspeed.load",
    "transformers.get_last_checkpoint", "transformers.trainer.get_last_checkpoint", "transformers.save",
}  # fmt: skip


def test_every_hook_has_fingerprints_and_a_reason_of_its_own() -> None:
    assert {hook.name for hook in HOOKS} == set(FINGERPRINTS)
    assert all(hook.fingerprints for hook in HOOKS)
    reasons = [hook.why for hook in HOOKS]
    assert len(set(reasons)) == len(reasons), sorted(reason for reason in reasons if reasons.count(reason) > 1)


def test_only_hooks_that_replace_a_result_refuse_an_unknown_source() -> None:
    assert {hook.name for hook in HOOKS if hook.strict} == REPLACE_A_RESULT


def test_a_timing_hook_is_installed_on_an_unknown_source_and_the_status_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "fingerprint", lambda _: "0" * 12)
    for hook in all_timing_hooks():
        found = hooks.examine(hook, version())
        assert found.state == "installed"
        assert found.reason == f"the source of {hook.attribute} is unknown (000000000000)"
