"""Facts about a model from its transformers configuration."""

from __future__ import annotations

from typing import Any

from unickpt.transform.dialects.model_facts import CONFIG_NAMES, Model


def model_of(module: Any) -> Model:
    """Return the facts that the configuration of a transformers model states. They are empty for other modules."""
    config = getattr(module, "config", None)
    return Model.of_config({name: getattr(config, name, None) for name in CONFIG_NAMES})
