"""The ordinary Trainer script of the tests. It arms unickpt as torch does if it is installed; this checkout may not be."""

import runpy

import _unickpt_autoload

_unickpt_autoload.arm()
runpy.run_module("tests.integration.hf.train_trainer", run_name="__main__", alter_sys=True)
