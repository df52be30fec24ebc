"""The kernels of ``mamba_ssm`` that Megatron's Mamba layers call, in torch operations, for the CPU.

The package needs a GPU. ``offer_mamba_ssm`` registers its functions before Megatron imports them. ``adapt_stack`` replaces the
one norm that needs TransformerEngine. The recurrence is the one of Mamba-2 (arXiv 2405.21060, section 2), one position after
the other.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from torch.nn.functional import conv1d, silu, softplus


def scan(
    x: torch.Tensor, dt: torch.Tensor, decay: torch.Tensor, into: torch.Tensor, out: torch.Tensor, direct: torch.Tensor
) -> torch.Tensor:
    """Return the output of the state space model.

    Args:
        x: ``[batch, length, heads, width]``.
        dt: step sizes, positive, ``[batch, length, heads]``.
        decay: A of the paper, negative, ``[heads]``.
        into, out: B and C of the paper, ``[batch, length, groups, state]``; a group serves ``heads / groups`` heads.
        direct: D of the paper, ``[heads]``.

    Returns:
        ``[batch, length, heads, width]``.
    """
    batch, length, heads, width = x.shape
    into, out = (each.repeat_interleave(heads // each.shape[2], dim=2) for each in (into, out))
    state = x.new_zeros(batch, heads, width, into.shape[-1])
    found = []
    for at in range(length):
        kept = torch.exp(dt[:, at] * decay)[..., None, None]
        state = state * kept + (dt[:, at, :, None] * x[:, at])[..., None] * into[:, at, :, None, :]
        found.append((state * out[:, at, :, None, :]).sum(-1) + direct[:, None] * x[:, at])
    return torch.stack(found, dim=1)


def mamba_split_conv1d_scan_combined(
    zxbcdt: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dt_bias: torch.Tensor, decay: torch.Tensor, *,
    headdim: int, ngroups: int, **given: Any,
) -> torch.Tensor:  # fmt: skip
    """Return ``[batch, length, heads * headdim]`` from the projected input: gate, x, B, C and step size side by side."""
    batch, length, columns = zxbcdt.shape
    heads = dt_bias.numel()
    inner = heads * headdim
    gate, mixed, dt = zxbcdt.split([inner, columns - inner - heads, heads], dim=-1)
    convolved = conv1d(mixed.transpose(1, 2), weight[:, None], bias, padding=weight.shape[-1] - 1, groups=len(weight))
    mixed = silu(convolved[..., :length].transpose(1, 2)).float()
    states = (mixed.shape[-1] - inner) // 2
    x, into, out = mixed.split([inner, states, states], dim=-1)
    y = scan(
        x.unflatten(-1, (heads, headdim)),
        softplus(dt.float() + dt_bias),
        decay,
        into.unflatten(-1, (ngroups, -1)),
        out.unflatten(-1, (ngroups, -1)),
        given["D"].float(),
    )
    return (y.reshape(batch, length, inner) * silu(gate.float())).to(zxbcdt.dtype)


class RMSNorm(torch.nn.Module):
    """Norm by groups, as ``mamba_ssm.ops.triton.layernorm_gated.RMSNorm`` without a gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=dtype))
        self.eps, self.group_size = eps, group_size or hidden_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        normed: torch.Tensor = (groups * scale).flatten(-2) * self.weight.float()
        return normed.to(x.dtype)


def offer_mamba_ssm() -> None:
    """Register the functions under the names of the package."""
    names = ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton")
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    norms: Any = types.ModuleType("mamba_ssm.ops.triton.layernorm_gated")
    scans: Any = types.ModuleType("mamba_ssm.ops.triton.ssd_combined")
    norms.RMSNorm = RMSNorm
    scans.mamba_split_conv1d_scan_combined, scans.mamba_chunk_scan_combined = mamba_split_conv1d_scan_combined, None
    sys.modules |= {norms.__name__: norms, scans.__name__: scans}


def adapt_stack() -> None:
    """Give the stack of layers torch's norm at its end. Megatron takes TransformerEngine's, whatever ``--spec`` says."""
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_block.TENorm = WrappedTorchNorm
