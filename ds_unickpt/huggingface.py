"""What the configuration of a model of transformers says about it."""

from __future__ import annotations

from typing import Any

from unickpt.language.facts import CONFIG_NAMES, Model


def model_of(module: Any) -> Model:
    """What the configuration of a model of transformers tells; nothing of other modules."""
    config = getattr(module, "config", None)
    return Model.of_config({name: getattr(config, name, None) for name in CONFIG_NAMES})
