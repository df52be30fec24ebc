"""Fingerprints of the functions that are hooked, per hook, as ``scripts/fingerprints.py`` prints them.

Sources: the releases of megatron-core from 0.12.0 to 0.19.0 and, as of August 2026, the development branch.
"""

from __future__ import annotations

_FORWARD = frozenset({"4908ed424340", "da678b8f9111", "991fac83a576", "2b7a08a99b01"})
_MIXED_STEP = frozenset({"33f06dfcb679", "d262a7e57bcf"})
_FP32_STEP = frozenset({"0c1876acf543", "079eac17a91b"})
_CHAINED_STEP = frozenset({"27e71ff44897", "4c1da4b6582e", "d2559c48739e", "fdac84ba2e8d", "316ae4c9c4eb"})

FINGERPRINTS: dict[str, frozenset[str]] = {
    "megatron.save": frozenset({"c8eb2f1cef71", "944778e3bb06", "f78edca4fb39", "31b008885288", "6255a490d300"}),
    "megatron.load": frozenset({
        "3735739caded", "a8620410c6f7", "4aa9bb62c1a8", "e44c828a5430", "a7dd3a384427", "b2e805907a41", "aebb10b8e43a",
    }),
    "megatron.load_common_state_dict": frozenset({
        "5e18eeacd756", "0b83fcc93981", "d7ed0e280a92", "e3fa2234d7f6", "f174c6e86d7b",
    }),
    "megatron.load_tensors_metadata": frozenset({"efd8e98f0ec3", "9d639e63edd7"}),
    "megatron.load_sharded_metadata": frozenset({"1434a3bd6b5e", "b39884e53e6e", "af6c34ee8315"}),
    "megatron.remove_sharded_tensors": frozenset({"b4ff30291613", "5c27aed98662", "157a446b945c"}),
    "megatron.get_default_save_sharded_strategy": frozenset({"63ab6158a9f8", "a473a93c2fc2", "a8d9c37ddc3e"}),
    "megatron.get_default_load_sharded_strategy": frozenset({"027d902a94b6", "d9c242e835ff", "fccf094256b4"}),
    "megatron.schedule_async_request": frozenset({"16065de0318d"}),
    "megatron.Float16OptimizerWithFloat16Params.sharded_state_dict": frozenset({
        "dd3fa4a66ac3", "25d48ba0cc2b", "48286ad348ab", "f30c33d1dc2b",
    }),
    "megatron.Float16OptimizerWithFloat16Params.load_state_dict": frozenset({"c6a6ddd4508a", "b820699431ed", "a803b63b0892"}),
    "megatron.FP32Optimizer.sharded_state_dict": frozenset({"ac1a17019ac6", "d8fee0ea56a6"}),
    "megatron.FP32Optimizer.load_state_dict": frozenset({"85af1734f09b", "2412e17fa665", "d527c08f5e26"}),
    "megatron.ChainedOptimizer.sharded_state_dict": frozenset({"3f5393514cce", "2769ed30bbbb", "882a4cd8674b"}),
    "megatron.ChainedOptimizer.load_state_dict": frozenset({"3914a93141a0", "779d9c0b2aca"}),
    "megatron.DistributedOptimizer.sharded_state_dict": frozenset({
        "8cfec0d38410", "2cf2cc473665", "8a52496bb982", "21b1c74efa2a", "34dcc692f490",
    }),
    "megatron.DistributedOptimizer.load_state_dict": frozenset({
        "1210da1dde41", "8dda39c30687", "b666f3e98033", "c19d0d19b2d0", "dbca4dfea737", "623633566a81",
    }),
    "megatron.LayerWiseDistributedOptimizer.sharded_state_dict": frozenset({"74b5c12bc5db", "4348c5523b7d"}),
    "megatron.LayerWiseDistributedOptimizer.load_state_dict": frozenset({"3e32c8954615"}),
    "megatron-lm.add_megatron_arguments": frozenset({
        "cce45174a96e", "8f70107343d2", "2dc2e201c0e9", "92794d66c6fb", "1b824e2bd141", "0b3e4938d574",
    }),
    "megatron-lm.parse_args": frozenset({"534e0e84ef8d", "1f9b89e3eb4b", "3240d34c4a30", "81beeb0c8a25"}),
    "megatron-lm.save_checkpoint": frozenset({
        "afc1f0a232bf", "e179c0d03afd", "e43104c35144", "4166fd2d8b68", "bec019da1a89", "b62355b78ea5", "cf029ec12824",
        "f4a476f1624e", "ce51bc5c0ad8", "e1af0e627d2e",
    }),
    "megatron-lm.load_checkpoint": frozenset({
        "832616140f4b", "47f752bff0e1", "94817a1e5735", "3f5ac5059378", "bb057e2066c9", "f80e77553079", "8f460d583f0b",
        "d8a951ef81ae",
    }),
    "megatron-lm.get_rng_state": frozenset({"f41ffbddd97c", "aa541d0f0f77", "e1cd32088131", "f5774b3b3f96", "1bbe2c2b1ae4"}),
    "megatron-lm.get_checkpoint_name": frozenset({"a488b8c81c16", "b77ac63feecb"}),
    "megatron-lm.get_checkpoint_tracker_filename": frozenset({"c55370c737d4"}),
    "megatron-lm.cleanup_old_non_persistent_checkpoint": frozenset({"307a67fa1a44", "e70d67a994ff"}),
    "megatron-lm.find_checkpoint_rank_0": frozenset({"53359bb55966", "2a689eaddda5", "383bad8f0863"}),
    "megatron-lm._get_checkpoint_format": frozenset({
        "d5d7c63252f8", "40d0839ef8d5", "44f7bf3e8472", "d4ef6a593035", "33ff2588623a",
    }),
    "megatron-lm._build_sharded_state_dict_metadata": frozenset({
        "eb552fe04316", "c4a959bf058d", "9bcf767d2c7a", "274da774896a", "c37c0c4a53c1", "2dce8ee48675",
    }),
    "megatron-lm.signals_received": frozenset({"fa8df265bb76"}),
    "megatron.timing.forward_step": _FORWARD,
    "megatron.precision.forward_step": _FORWARD,
    "megatron.witness.forward_step": _FORWARD,
    "megatron.timing.backward_step": frozenset({
        "37149056274f", "090851246e36", "83315569775a", "79b4d7d5cff7", "6e5444e53268",
    }),
    "megatron.timing.MixedPrecisionOptimizer.step": _MIXED_STEP,
    "megatron.timing.FP32Optimizer.step": _FP32_STEP,
    "megatron.timing.ChainedOptimizer.step": _CHAINED_STEP,
    "megatron.witness.MixedPrecisionOptimizer.step": _MIXED_STEP,
    "megatron.witness.FP32Optimizer.step": _FP32_STEP,
    "megatron.witness.ChainedOptimizer.step": _CHAINED_STEP,
    "megatron.timing.initialize_model_parallel": frozenset({
        "84d78e37670f", "afb465679ae9", "72fcdcdd24b0", "0f19166e91be", "4b9ef9f58fb7", "14c9c5867669", "36d3cdafa386",
        "9b608267f6ee",
    }),
    "megatron.timing.save": frozenset({"c8eb2f1cef71", "944778e3bb06", "f78edca4fb39", "31b008885288", "6255a490d300"}),
    "megatron.timing.load": frozenset({
        "3735739caded", "a8620410c6f7", "4aa9bb62c1a8", "e44c828a5430", "a7dd3a384427", "b2e805907a41", "aebb10b8e43a",
    }),
}  # fmt: skip
