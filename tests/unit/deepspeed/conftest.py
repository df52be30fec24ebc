"""Tests of the adapter for DeepSpeed. Without DeepSpeed they are not collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("deepspeed") else ["test_*.py"]
