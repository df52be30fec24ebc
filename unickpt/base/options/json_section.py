"""Options of a job from the ``unickpt`` key of a JSON configuration, and the JSON Schema of this key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.base.errors import ConfigError
from unickpt.base.options.declared import KEY, UNLIMITED, unknown
from unickpt.base.options.job import SECTIONS, Options, declared


def from_json(section: Any) -> Options:
    """Return the options from the value of the ``unickpt`` key.

    Raises:
        ConfigError: the value is not an object, has an unknown option (the message names the nearest valid one), or a
            value has a wrong type or is out of bounds.
    """
    return _section("", section)  # type: ignore[no-any-return]


def _section(name: str, section: Any) -> Any:
    path = ".".join(filter(None, [KEY, name]))
    if name == "compression" and isinstance(section, str):
        section = {"scheme": section}
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{path}" must be an object such as {{"enabled": true}}, not {section!r}')
    known = {option.key: option for option in declared(name)}
    inside = [] if name else [other for other in SECTIONS if other]
    values: dict[str, Any] = {}
    for key, value in section.items():
        if key in inside:
            values[key] = _section(key, value)
        elif key in known:
            values[key] = known[key].checked(value, f'"{path}.{key}"')
        else:
            raise unknown(key, [*known, *inside], f"{path}.")
    return SECTIONS[name](**values)


def schema(name: str = "") -> dict[str, Any]:
    """Return the JSON Schema of a section; '' for the value of the ``unickpt`` key."""
    types = {bool: "boolean", int: "integer", float: "number", str: "string"}
    properties: dict[str, Any] = {}
    for option in declared(name):
        about: dict[str, Any] = {"type": types[option.kind], "description": option.text}
        about |= {} if option.default == UNLIMITED else {"default": option.default}
        about |= {"enum": list(option.choices)} if option.choices else {}
        about |= {"exclusiveMinimum": 0} if option.kind is float else {}
        about |= {"minimum": option.least} if option.kind is int else {}
        about |= {"maximum": option.most} if option.most is not None else {}
        about |= {"type": "array", "items": {"type": "string"}, "default": option.default.split(",")} if option.several else {}
        properties[option.key] = about
    properties |= {} if name else {other: schema(other) for other in SECTIONS if other}
    kinds = ["object", "string"] if name == "compression" else "object"  # the name of a scheme stands for the section
    return {"type": kinds, "additionalProperties": False, "properties": properties}
