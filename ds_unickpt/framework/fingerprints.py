"""Fingerprints of the functions that are hooked, per hook, as ``scripts/fingerprints.py`` prints them.

Sources: the releases of DeepSpeed from 0.17.0 to 0.19.8; transformers 4.50.0, 4.57.1, 5.0.0 and 5.23.0.
"""

from __future__ import annotations

_SAVE = frozenset({"85ed64e26862", "7713b1f2cbee", "1aeaee6c21f5", "f46deab9e085", "2d2899f240c8"})
_LOAD = frozenset({"551850db228f", "4a4e199b14f5", "dce692e2a74f"})
_STEP = frozenset({"bb22172bbc43", "e8b6b72d325f", "eade1e974521", "d58a7731de8f", "9cb826cb3673", "468476ce9cfe"})
_LAST_CHECKPOINT = frozenset({"652647a3fcc8"})

FINGERPRINTS: dict[str, frozenset[str]] = {
    "deepspeed.configure": frozenset({"05231fd69ed9", "a3ffb260c85d", "e5638865d837"}),
    "deepspeed.save": _SAVE,
    "deepspeed.load": _LOAD,
    "deepspeed.batch": frozenset({"c62ced40ba2e"}),
    "deepspeed.compression.bucket": frozenset({"8cf6ae4d4434"}),
    "deepspeed.compression.zero": frozenset({"7e7057471dba"}),
    "deepspeed.compression.engine": frozenset({"2fe47667fb66"}),
    "deepspeed.settle.fragment": frozenset({"998aeb72e09f"}),
    "deepspeed.settle.full": frozenset({"9b6825fdab21", "c086a0fe5598"}),
    "deepspeed.settle.local": frozenset({"2872bd1064c2", "006898d0209f"}),
    "deepspeed.settle.offload": frozenset({"1dc236777760", "a3a09ee49c1c", "3b08316ac451"}),
    "deepspeed.settle.reload": frozenset({"e0ea31800489", "f98bae97d31e"}),
    "deepspeed.zero_to_fp32": frozenset({"57048e9edbcb"}),
    "deepspeed.fp32_state_dict": frozenset({"c851da9681b6"}),
    "deepspeed.ds_to_universal": frozenset({"0ba5a81f38a1"}),
    "deepspeed.timing.forward": frozenset({
        "a2be8d7af106", "ae8d59b7379f", "47bf3e961431", "c55314c337b0", "3d4714d568ea", "502ab606ba19", "7e5557593cf0",
        "2fe6400eea28",
    }),
    "deepspeed.timing.backward": frozenset({
        "f81f0c6487bc", "513d3d49cb4c", "1d69674aa46c", "d82d9fcf82a2", "9ba876a409ce", "c1015e381591",
    }),
    "deepspeed.timing.start": frozenset({
        "7337411330e6", "ad3438a4ff65", "3fe871fa8e34", "b0e1ba1f5e5e", "9ed854f785a5", "e87717ab6854",
    }),
    "deepspeed.timing.step": _STEP,
    "deepspeed.timing.save": _SAVE,
    "deepspeed.timing.load": _LOAD,
    "deepspeed.witness.step": _STEP,
    "deepspeed.witness.load": _LOAD,
    "transformers.get_last_checkpoint": _LAST_CHECKPOINT,
    "transformers.trainer.get_last_checkpoint": _LAST_CHECKPOINT,
    "transformers.batch": frozenset({"b42012fb0949", "4a890ff0b285"}),
    "transformers.train": frozenset({"bb42940246d8", "cb8b164d3c4d", "f9d3f75abfac", "1141b5be39e0"}),
    "transformers.save": frozenset({"aad2b7c90fd8", "52c7877bc4d6", "31e1bf1ed595"}),
    "transformers.load_trainer_state": frozenset({"bcfb8b30b7ad"}),
}  # fmt: skip
