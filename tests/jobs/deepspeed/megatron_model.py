"""A small Transformer of Megatron-style layers: a user's own column-, row- and vocabulary-parallel layers, and an ``mpu``.

It has every kind of division: columns, rows, vocabulary with padding, fused projections with sub-parameters of several sizes,
strided columns, replicas. Some parameters are described by the attributes that Megatron's layers set, some by
``universal_checkpoint_info`` as in Megatron-DeepSpeed, some by both.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as functional

from tests.jobs.deepspeed.model import LENGTH, VOCABULARY
from tests.jobs.deepspeed.tensor_model import HEAD, HEADS, KEYS, WIDTH, attention

INNER = 12
DIVISIBLE_BY = 3  # the vocabulary is padded to a multiple of this and of the number of tensor-parallel ranks


class Mpu:
    """Process groups of a job without pipeline, as DeepSpeed asks for them. Consecutive ranks are tensor-parallel."""

    def __init__(self, tensor: int) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        every = [list(range(at, at + tensor)) for at in range(0, world, tensor)]
        across = [list(range(at, world, tensor)) for at in range(tensor)]
        self._tensor = next(group for group, ranks in _groups(every) if rank in ranks)
        self._data = next(group for group, ranks in _groups(across) if rank in ranks)

    def __deepcopy__(self, _memo: Any) -> Mpu:
        return self  # DeepSpeed copies experts, whose layers have the mpu

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._tensor)

    def get_model_parallel_world_size(self) -> int:
        return dist.get_world_size(self._tensor)

    def get_model_parallel_group(self) -> Any:
        return self._tensor

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)

    def get_data_parallel_group(self) -> Any:
        return self._data

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group


class SequenceMpu(Mpu):
    """The same with sequence parallelism. A sequence is on consecutive ranks, or tensor-parallel groups of ranks."""

    def __init__(self, tensor: int, sequence: int) -> None:
        super().__init__(tensor)
        rank, world, block = dist.get_rank(), dist.get_world_size(), tensor * sequence
        peers = [list(range(at + lane, at + block, tensor)) for at in range(0, world, block) for lane in range(tensor)]
        across = [list(range(at, world, block)) for at in range(block)]
        self._sequence_data = self._data
        self._sequence = next(group for group, ranks in _groups(peers) if rank in ranks)
        self._data = next(group for group, ranks in _groups(across) if rank in ranks)

    def get_sequence_parallel_rank(self) -> int:
        return dist.get_rank(self._sequence)

    def get_sequence_parallel_world_size(self) -> int:
        return dist.get_world_size(self._sequence)

    def get_sequence_parallel_group(self) -> Any:
        return self._sequence

    def get_sequence_data_parallel_rank(self) -> int:
        return dist.get_rank(self._sequence_data)

    def get_sequence_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._sequence_data)

    def get_sequence_data_parallel_group(self) -> Any:
        return self._sequence_data


def _groups(ranks: list[list[int]]) -> list[tuple[Any, list[int]]]:
    return [(dist.new_group(each), each) for each in ranks]


@cache
def mpu_of(tensor: int, _of: int = 0, sequence: int = 1) -> Mpu:
    """Return the ``mpu`` of this process for numbers of parallel ranks. ``_of`` tells jobs in turn apart."""
    return Mpu(tensor) if sequence == 1 else SequenceMpu(tensor, sequence)


class _Enter(torch.autograd.Function):
    """The activations of all tensor-parallel ranks, whose gradients are sums."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Leave(torch.autograd.Function):
    """The sum of the partial activations of all tensor-parallel ranks."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Join(torch.autograd.Function):
    """The columns of all tensor-parallel ranks, side by side."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(dist.get_world_size(ctx.group), dim=-1)[dist.get_rank(ctx.group)].contiguous(), None


def part_of(whole: torch.Tensor, dim: int, sizes: list[int], mpu: Mpu) -> torch.Tensor:
    """Return this rank's part: its share of each of the sub-parameters of ``sizes`` along ``dim``."""
    rank, world = mpu.get_tensor_model_parallel_rank(), mpu.get_tensor_model_parallel_world_size()
    return torch.cat([each.chunk(world, dim)[rank] for each in whole.split(sizes, dim)], dim)


def joined(parts: list[torch.Tensor], dim: int, sizes: list[int]) -> torch.Tensor:
    """Return the whole parameter from the parts of all tensor-parallel ranks."""
    each = [part.split([size // len(parts) for size in sizes], dim) for part in parts]
    return torch.cat([torch.cat(same, dim) for same in zip(*each, strict=True)], dim)


def _mark(parameter: nn.Parameter, dim: int, stride: int = 1) -> nn.Parameter:
    """Set the attributes that Megatron's layers set (``set_tensor_model_parallel_attributes``)."""
    vars(parameter).update(tensor_model_parallel=dim >= 0, partition_dim=dim, partition_stride=stride)
    return parameter


class Columns(nn.Linear):
    """A column-parallel layer. ``sizes`` are those of its sub-parameters; ``stride`` tells Megatron that they are equal."""

    def __init__(self, mpu: Mpu, inputs: int, sizes: list[int], stride: int = 1) -> None:
        super().__init__(inputs, sum(sizes))
        self.mpu = mpu
        self.weight = _mark(nn.Parameter(part_of(self.weight.detach(), 0, sizes, mpu)), 0, stride)
        self.bias = _mark(nn.Parameter(part_of(self.bias.detach(), 0, sizes, mpu)), 0, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(_Enter.apply(x, self.mpu.get_tensor_model_parallel_group()))


class Rows(nn.Linear):
    """A row-parallel layer. Every rank has the whole bias."""

    def __init__(self, mpu: Mpu, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.mpu = mpu
        self.weight = _mark(nn.Parameter(part_of(self.weight.detach(), 1, [inputs], mpu)), 1)
        _mark(self.bias, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Leave.apply(x @ self.weight.t(), self.mpu.get_tensor_model_parallel_group()) + self.bias


def looked_up(words: torch.Tensor, tokens: torch.Tensor, mpu: Mpu) -> torch.Tensor:
    """Return the embeddings ``[..., width]`` of tokens. ``words``: this rank's rows of a vocabulary ``[rows, width]``."""
    rows = len(words)
    local = tokens - mpu.get_tensor_model_parallel_rank() * rows
    mine = (local >= 0) & (local < rows)
    found = functional.embedding(local.clamp(0, rows - 1), words) * mine[..., None]
    return _Leave.apply(found, mpu.get_tensor_model_parallel_group())  # type: ignore[no-any-return]


def logits_of(words: torch.Tensor, x: torch.Tensor, mpu: Mpu) -> torch.Tensor:
    """Return the logits ``[..., vocabulary]`` of the words of all ranks, also of the padding."""
    group = mpu.get_tensor_model_parallel_group()
    return _Join.apply(_Enter.apply(x, group) @ words.t(), group)  # type: ignore[no-any-return]


class Embedding(nn.Module):
    """The tied module, whose words alone are synchronized between the stages of a pipeline, as in Megatron-DeepSpeed."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        self.mpu = mpu
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.frozen = nn.Parameter(torch.tensor([0.1, -0.2, 0.3]), requires_grad=False)
        ranks = mpu.get_tensor_model_parallel_world_size()
        padding = -VOCABULARY % (DIVISIBLE_BY * ranks)
        words = torch.randn(VOCABULARY, WIDTH) * 0.1
        padded = torch.cat([words, torch.randn(padding, WIDTH)])
        self.words = _mark(nn.Parameter(part_of(padded, 0, [len(padded)], mpu)), 0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return looked_up(self.words, tokens, self.mpu) + self.positions + self.frozen.sum()


def head(module: Embedding, x: torch.Tensor) -> torch.Tensor:
    """Return the logits of all words, without those of the padding."""
    return logits_of(module.words, x, module.mpu)[..., :VOCABULARY]


class Gated(nn.Module):
    """A block with grouped keys and a gate, whose fused projections ``universal_checkpoint_info`` describes."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = Columns(mpu, WIDTH, [WIDTH, KEYS, KEYS])
        self.out = Rows(mpu, WIDTH, WIDTH)
        self.gate_up = Columns(mpu, WIDTH, [INNER, INNER])
        self.down = Rows(mpu, INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm(x))
        keys = qkv.shape[-1] // (HEADS * HEAD // KEYS + 2)
        q, k, v = qkv.split([qkv.shape[-1] - 2 * keys, keys, keys], dim=-1)
        x = x + self.out(attention(q, k, v, torch.ones(HEAD, dtype=x.dtype)))
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return x + self.down(functional.silu(gate) * up)


class Classic(nn.Module):
    """A block whose parameters the attributes describe, also the strided one and the replicas."""

    def __init__(self, mpu: Mpu) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.pair = Columns(mpu, WIDTH, [INNER, INNER], stride=2)
        self.down = Rows(mpu, INNER, WIDTH)
        self.register_buffer("scale", torch.rand(3, 5))
        for parameter in self.norm.parameters():
            _mark(parameter, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.pair(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(one * torch.tanh(other)) * self.scale.mean().to(x.dtype)


INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCABULARY,
    "vocabulary_parameter_patterns": [r"tied_modules.embed.words"],
    "tp_replicated_parameter_patterns": [r"\d+.norm.(weight|bias)", r"tied_modules.embed.(positions|frozen)"],
    "parameter_with_2_sub_params_cat_dim_0": [r"\d+.gate_up.weight", r"\d+.gate_up.bias"],
    "parameter_with_sub_params": [
        {"patterns": [r"\d+.qkv.weight"], "shape": ((WIDTH, KEYS, KEYS), WIDTH), "partition_dim": 0},
        {"patterns": [r"\d+.qkv.bias"], "shape": ((WIDTH, KEYS, KEYS),), "partition_dim": 0},
    ],
    "parameter_with_row_parallelism_patterns": [r"\d+.out.weight"],
}
# How each parameter is divided, by the last parts of its name: dimension, and sizes of sub-parameters
CUTS = {
    "words": (0, ()), "qkv.weight": (0, (WIDTH, KEYS, KEYS)), "qkv.bias": (0, (WIDTH, KEYS, KEYS)),
    "gate_up.weight": (0, (INNER, INNER)), "gate_up.bias": (0, (INNER, INNER)), "pair.weight": (0, (INNER, INNER)),
    "pair.bias": (0, (INNER, INNER)), "out.weight": (1, ()), "down.weight": (1, ()),
}  # fmt: skip
