"""The scheme of every module of a model, from one scheme for all or from a plan, and the configuration that states it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.base.errors import FormatError, MismatchError
from unickpt.base.listing import some
from unickpt.transform.quantise.modules import Unit
from unickpt.transform.quantise.scheme import BITS, Scheme

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
PLAN_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Recipe:
    """Scheme of every module that can be rounded.

    Attributes:
        schemes: scheme by name of the module.
        notes: what differs from the request, one sentence each.
    """

    schemes: Mapping[str, Scheme]
    notes: tuple[str, ...] = ()

    @property
    def rounds(self) -> bool:
        """Whether any weight is rounded."""
        return any(scheme.rounds for scheme in self.schemes.values())

    def quantization_config(self, others: Sequence[str]) -> dict[str, Any]:
        """Return ``quantization_config`` for ``config.json``.

        One scheme for all modules has the target ``Linear``. Several name their modules.

        Args:
            others: modules with a matrix that are not in ``schemes``, such as the head: they stay as they are.
        """
        chosen = sorted({scheme for scheme in self.schemes.values() if scheme.rounds})
        kept = [module for module, scheme in self.schemes.items() if not scheme.rounds]
        groups = {
            f"group_{at}": {
                "targets": ["Linear"] if len(chosen) == 1 else [m for m, found in self.schemes.items() if found == scheme],
                "weights": {
                    "num_bits": scheme.bits,
                    "type": "int",
                    "symmetric": True,
                    "dynamic": False,
                    "strategy": "group" if scheme.group else "channel",
                    "group_size": scheme.group or None,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for at, scheme in enumerate(chosen)
        }
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": sorted({"lm_head", *others, *kept}),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }


def uniform(scheme: Scheme, units: Sequence[Unit]) -> Recipe:
    """Return one scheme for all modules. Units whose rows do not divide into its groups get the next that fits.

    Raises:
        MismatchError: there is no module to round.
    """
    if scheme.rounds and not units:
        raise MismatchError("no weight can be rounded: the model has no matrices under 'layers.N', as Linear modules have them")
    found = {unit.name: scheme.fitted(unit.shapes) for unit in units}
    others = {other: [name for name, each in found.items() if each == other] for other in set(found.values()) - {scheme}}
    notes = tuple(f"{other} instead of {scheme}, because of their shapes: {some(names)}" for other, names in others.items())
    return Recipe({module: found[unit.name] for unit in units for module in unit.modules}, notes)


def planned(plan: Any, units: Sequence[Unit], where: str) -> Recipe:
    """Return the schemes of a plan of ``unickpt plan bits``.

    Args:
        plan: the parsed document.
        units: units of the model.
        where: name of the file in messages.

    Raises:
        FormatError: the document is not a plan.
        MismatchError: it is the plan of another model, or a scheme does not fit a weight.
    """
    if not isinstance(plan, dict) or plan.get("schema") != PLAN_SCHEMA or not isinstance(plan.get("units"), list):
        raise FormatError(f"{where}: not a plan of 'unickpt plan bits'")
    schemes = dict(_entry(each, where) for each in plan["units"])
    missing, strange = sorted({unit.name for unit in units} - schemes.keys()), sorted(schemes.keys() - {u.name for u in units})
    if missing or strange:
        raise MismatchError(
            f"{where}: is the plan of another model: "
            + (f"it lacks {some(missing)}" if missing else f"the model has no {some(strange)}")
        )
    wrong = [unit.name for unit in units if not all(schemes[unit.name].fits(shape) for shape in unit.shapes)]
    if wrong:
        raise MismatchError(f"{where}: the group does not divide the rows of {some(wrong)}")
    return Recipe({module: schemes[unit.name] for unit in units for module in unit.modules})


def _entry(entry: Any, where: str) -> tuple[str, Scheme]:
    try:
        name, scheme = entry["unit"], Scheme(entry["bits"], entry["group"] or 0)
    except (TypeError, KeyError):
        raise FormatError(f"{where}: a unit needs 'unit', 'bits' and 'group'") from None
    whole = type(scheme.group) is int and scheme.group >= 0
    if not isinstance(name, str) or scheme.bits not in BITS or not whole or (scheme.group and not scheme.rounds):
        raise FormatError(f"{where}: {name}: {scheme.bits} bits in groups of {scheme.group} are not possible")
    return name, scheme
