"""Run unmodified megatron-core and Megatron-LM on CPU and gloo. Import before anything from ``megatron``.

Nothing of Megatron is edited. Torch's entry points that would touch a CUDA device are redirected to
the CPU; process groups, collectives, sharding, buckets, schedules, optimizers and checkpoint code
are the real ones. ``adapt_megatron`` fills seven gaps that CUDA or TransformerEngine would fill.

What this cannot show: streams and their overlap, pinned memory, NCCL, fused kernels, fp8, and
TransformerEngine's modules and precision-aware optimizer.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib.util
import logging
import os
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron's jit_fuser is torch.compile
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # the scripts assert it

if not hasattr(typing, "override"):  # the development branch wants Python 3.12
    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]

import torch
import torch.distributed as dist
from torch.utils._device import _device_constructors

from megatron_unickpt.framework import remainders

_ADDRESSED = (
    "megatron",
    "tests.jobs.megatron",
    "evidence",
    "tests.unit_tests",
    "pretrain",
    "gpt_builders",
    "mamba_builders",
    "hybrid_builders",
    "model_provider",
    "__main__",
)


def _called_by_megatron() -> bool:
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(_ADDRESSED)


def _on_cpu(device: Any) -> Any:
    """Return the CPU for ``cuda``, ``cuda:N`` and numbers, and any other device unchanged."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return torch.device("cpu")
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


class _Stream:
    cuda_stream = stream_id = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def wait(self, *_: Any) -> None:
        pass

    synchronize = wait

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other.at - self.at) * 1e3


class _Generators:
    def __getitem__(self, _: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _noop() -> Callable[..., None]:
    """Return a new function for every place, because torch's compiler has a table of functions by identity."""
    return lambda *_, **__: None


def _redirect_cuda() -> None:
    cuda: Any = torch.cuda
    available, stream = cuda.is_available, _Stream()
    cuda.is_available = lambda: True if _called_by_megatron() else available()
    cuda.device_count = lambda: 8 if _called_by_megatron() else 0
    cuda.is_initialized = lambda: False
    cuda.current_device = lambda: 0
    for name in (
        "set_device",
        "synchronize",
        "empty_cache",
        "ipc_collect",
        "_lazy_init",
        "set_stream",
        "reset_peak_memory_stats",
    ):
        setattr(cuda, name, _noop())
    cuda._lazy_call = lambda callback, **_: callback()
    cuda.Stream, cuda.Event, cuda.ExternalStream = _Stream, _Event, _Stream
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *_, **__: stream)
    for name in ("stream", "device"):
        setattr(cuda, name, lambda *_, **__: contextlib.nullcontext())
    cuda.get_device_properties = lambda *_, **__: types.SimpleNamespace(
        name="cpu", major=8, minor=0, total_memory=1 << 34, multi_processor_count=1
    )
    cuda.get_device_capability = lambda *_, **__: (8, 0)
    cuda.get_device_name = lambda *_, **__: "cpu"
    for name in (
        "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used",
        "utilization", "temperature", "power_draw", "clock_rate",
    ):  # fmt: skip
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.mem_get_info = lambda *_, **__: (1 << 34, 1 << 34)
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.nvtx = types.SimpleNamespace(
        range_push=_noop(), range_pop=_noop(), mark=_noop(), range=lambda *_, **__: contextlib.nullcontext()
    )
    sys.modules["torch.cuda.nvtx"] = cuda.nvtx
    # The CUDA generator is the CPU's, so that forks of the trackers work.
    for name in ("manual_seed", "manual_seed_all"):
        setattr(cuda, name, lambda seed: torch.default_generator.manual_seed(int(seed)) and None)
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.default_generator.get_state()
        module.set_rng_state = lambda state, *_, **__: torch.default_generator.set_state(state)
    cuda.default_generators = _Generators()


def _with_device_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def redirected(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return redirected


def _redirect_tensors() -> None:
    names = {getattr(f, "__name__", "") for f in _device_constructors()}
    names |= {f"{kind}_like" for kind in ("zeros", "ones", "empty", "full", "rand", "randn", "randint")}
    for name in sorted(names):
        function = getattr(torch, name, None)
        if name and callable(function) and not isinstance(function, type):
            setattr(torch, name, _with_device_on_cpu(function))
    tensor: Any = torch.Tensor
    for name in ("new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"):
        setattr(tensor, name, _with_device_on_cpu(getattr(tensor, name)))

    def moved(original: Callable[..., Any]) -> Callable[..., Any]:
        def to(self: Any, *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], (str, torch.device, int)) and not isinstance(args[0], bool):
                args = (_on_cpu(args[0]), *args[1:])
            if "device" in kwargs:
                kwargs["device"] = _on_cpu(kwargs["device"])
            return original(self, *args, **kwargs)

        return to

    tensor.to, torch.nn.Module.to = moved(tensor.to), moved(torch.nn.Module.to)  # type: ignore[method-assign]
    for owner, name in ((tensor, "cuda"), (tensor, "pin_memory"), (torch.nn.Module, "cuda")):
        setattr(owner, name, lambda tensor, *_, **__: tensor)
    tensor.is_pinned = lambda *_, **__: False
    tensor.record_stream = _noop()
    spelled = tensor.type

    def type_of(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the CUDA name of a tensor type, which Megatron compares with ``type()``."""
        found = spelled(self, *args, **kwargs)
        plain = not args and not kwargs and found.startswith("torch.") and found.count(".") == 1
        return found.replace("torch.", "torch.cuda.", 1) if plain and _called_by_megatron() else found

    tensor.type = type_of
    on_device = tensor.is_cuda

    def is_cuda(self: Any) -> bool:
        """Answer the CPU offloading optimizer, which divides parameters by their place: copies for the host are on the CPU."""
        caller = sys._getframe(1)
        if str(caller.f_globals.get("__name__", "")).endswith(".hybrid_optimizer"):
            return not caller.f_locals.get("cpu_copy", False)
        return bool(on_device.__get__(self))

    tensor.is_cuda = property(is_cuda)


def _redirect_collectives() -> None:
    def gloo(name: Any) -> Any:
        return "gloo" if isinstance(name, str) and "nccl" in name else name

    init, group, reduce, scatter = dist.init_process_group, dist.new_group, dist.all_reduce, dist.reduce_scatter_tensor

    @functools.wraps(init)
    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init(gloo(backend) or "gloo", *args, **kwargs)

    @functools.wraps(group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        if "backend" in kwargs:
            kwargs["backend"] = gloo(kwargs["backend"])
        return group(*args, **kwargs)

    def averaging(function: Callable[..., Any]) -> Callable[..., Any]:
        """Average by a sum, because gloo has no AVG."""

        @functools.wraps(function)
        def averaged(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("op") != dist.ReduceOp.AVG:
                return function(*args, **kwargs)
            kwargs["op"] = dist.ReduceOp.SUM
            work = function(*args, **kwargs)
            if work is not None:
                work.wait()
            (args[0] if args else kwargs.get("tensor", kwargs.get("output"))).div_(dist.get_world_size(kwargs.get("group")))
            return work

        return averaged

    dist.init_process_group, dist.new_group = init_process_group, new_group
    dist.all_reduce, dist.reduce_scatter_tensor = averaging(reduce), averaging(scatter)
    send, exchange, gather, scatter_list = dist.isend, dist.all_to_all_single, dist.all_gather, dist.reduce_scatter
    flying: list[tuple[Any, torch.Tensor]] = []

    @functools.wraps(send)
    def isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Send a copy. gloo has no streams, and Megatron frees the buffer when this returns."""
        flying[:] = [(work, kept) for work, kept in flying if not work.is_completed()]
        kept = tensor.detach().clone()
        work = send(kept, *args, **kwargs)
        flying.append((work, kept))
        return work

    @functools.wraps(exchange)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Convert split sizes to lists, which Megatron does only on a GPU."""

        def listed(sizes: Any) -> Any:
            return sizes.tolist() if torch.is_tensor(sizes) else None if sizes is None else [int(n) for n in sizes]

        return exchange(output, input, listed(output_split_sizes), listed(input_split_sizes), *args, **kwargs)

    @functools.wraps(gather)
    def all_gather(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        if len({t.shape for t in tensors}) <= 1:
            return gather(tensors, tensor, group=group, async_op=async_op)
        for source, out in enumerate(tensors):  # uneven sizes: NCCL sends one broadcast per rank, gloo refuses them
            if source == dist.get_rank(group):
                out.copy_(tensor)
            dist.broadcast(out, group=group, group_src=source)
        return None

    @functools.wraps(scatter_list)
    def reduce_scatter(
        output: torch.Tensor, inputs: list[torch.Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({t.shape for t in inputs}) <= 1:
            return scatter_list(output, inputs, op=op, group=group, async_op=async_op)
        for target, part in enumerate(inputs):
            own = part.contiguous().clone()
            dist.reduce(own, group_dst=target, op=op, group=group)
            if target == dist.get_rank(group):
                output.copy_(own)
        return None

    dist.isend = dist.distributed_c10d.isend = isend
    dist.all_to_all_single, dist.all_gather, dist.reduce_scatter = all_to_all_single, all_gather, reduce_scatter


class FusedAdam(torch.optim.Optimizer):
    """Adam with ``step`` in the parameter group, as Apex's and TransformerEngine's have it, in torch operations.

    Without one of those, Megatron takes torch's AdamW, and then its own loads of a distributed optimizer end in
    an assertion, because a fresh optimizer has no step yet. ``MEGATRON_TESTS_TORCH_ADAM=1`` leaves it so.

    With ``master_weights`` it keeps the masters of bf16 parameters as TransformerEngine does for a precision-aware optimizer
    with ``store_param_remainders``.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, *, master_weights: bool = False,
        use_decoupled_grad: bool = False, master_weight_dtype: Any = None, exp_avg_dtype: Any = None,
        exp_avg_sq_dtype: Any = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            params, {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        assert {master_weight_dtype, exp_avg_dtype, exp_avg_sq_dtype} <= {None, torch.float32}
        self.adam_w_mode, self.master_weights, self.decoupled = adam_w_mode, master_weights, use_decoupled_grad

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        state = self.state[parameter]
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(parameter, dtype=torch.float32 if self.master_weights else None)
        if self.master_weights and parameter.dtype == torch.bfloat16:
            state["master_param"] = torch.zeros_like(parameter, dtype=torch.int16)

    def get_unscaled_state(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        found: torch.Tensor = self.state[parameter][name]
        return found

    def set_scaled_state(self, parameter: torch.Tensor, name: str, value: torch.Tensor) -> None:
        assert value.dtype == self.state[parameter][name].dtype
        self.state[parameter][name].copy_(value)

    @torch.no_grad()
    def step(self, _: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                gradient = getattr(parameter, "decoupled_grad", None) if self.decoupled else parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not self.master_weights or "master_param" not in state:
                    self._update(parameter, gradient, state, group)
                    continue
                master = remainders.joined(parameter, state["master_param"])
                self._update(master, gradient.float(), state, group)
                weights, rest = remainders.divided(master)
                parameter.copy_(weights)
                state["master_param"].copy_(rest)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, state: Any, group: Any) -> None:
        (b1, b2), lr = group["betas"], group["lr"]
        first, second = 1 - b1 ** group["step"], 1 - b2 ** group["step"]
        if not self.adam_w_mode:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        mean = state["exp_avg"].lerp_(gradient, 1 - b1)
        square = state["exp_avg_sq"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        if self.adam_w_mode:
            parameter.mul_(1 - lr * group["weight_decay"])
        parameter.addcdiv_(mean / first, (square / second).sqrt_().add_(group["eps"]), value=-lr)


@contextlib.contextmanager
def torch_adam() -> Iterator[None]:
    """Let Megatron make torch's AdamW meanwhile, as it does without TransformerEngine and Apex."""
    import megatron.core.optimizer as module

    before = module.Adam, module.USING_PYTORCH_OPTIMIZER
    module.Adam, module.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True
    try:
        yield
    finally:
        module.Adam, module.USING_PYTORCH_OPTIMIZER = before


def _offer_fused_adam() -> None:
    if os.environ.get("MEGATRON_TESTS_TORCH_ADAM") != "1":
        module: Any = types.ModuleType("apex.optimizers")
        module.FusedAdam, module.FusedSGD = FusedAdam, torch.optim.SGD
        sys.modules["apex.optimizers"] = module  # this alone: ``import apex`` still fails


def has_grouped_experts() -> bool:
    """Return whether this Megatron has ``GroupedMLP``, up to 0.18. Its successor is TransformerEngine's."""
    return importlib.util.find_spec("megatron.core.transformer.moe.grouped_gemm_util") is not None


def offer_grouped_gemm() -> None:
    """Offer the package ``grouped_gemm``, which needs CUDA, in torch's operations, to models that are built from now on."""
    from megatron.core.transformer.moe import grouped_gemm_util

    def gmm(inputs: torch.Tensor, weights: torch.Tensor, sizes: torch.Tensor, trans_b: bool = False) -> torch.Tensor:
        parts = torch.split(inputs, [int(size) for size in sizes])
        return torch.cat([part @ (w.t() if trans_b else w) for part, w in zip(parts, weights, strict=True)])

    module: Any = types.ModuleType("grouped_gemm")
    module.ops = types.SimpleNamespace(gmm=gmm)
    grouped_gemm_util.grouped_gemm, grouped_gemm_util.ops = module, module.ops


def _quieten() -> None:
    """Allow a changed CPU generator: the CUDA generator is the CPU's here."""
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(lambda r: "CPU RNG state changed" not in r.getMessage())


def _accept_older_releases() -> None:
    """Add what Megatron before 0.15 expects of older torch and numpy."""
    import numpy as np
    from torch.distributed.checkpoint import filesystem

    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]
    write = filesystem._write_item

    @functools.wraps(write)
    def write_item(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 5:
            kwargs.setdefault("serialization_format", filesystem.SerializationFormat.TORCH_SAVE)
        return write(*args, **kwargs)

    filesystem._write_item = write_item


_quieten()
_accept_older_releases()
_redirect_cuda()
_redirect_tensors()
_redirect_collectives()
_offer_fused_adam()


class _GatherKeys(torch.autograd.Function):
    """Gathers keys or values of all context parallel ranks in sequence order. The backward sums them for this rank."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Any) -> torch.Tensor:  # type: ignore[override]
        ctx.group, ctx.size, ctx.rank = group, group.size(), group.rank()
        parts = [torch.empty_like(own) for _ in range(ctx.size)]
        dist.all_gather(parts, own.contiguous(), group=group)
        halves = [part.chunk(2, dim=0) for part in parts]
        return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], dim=0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=ctx.group)
        chunks = gradient.chunk(2 * ctx.size, dim=0)
        return torch.cat([chunks[ctx.rank], chunks[2 * ctx.size - 1 - ctx.rank]], dim=0), None


def compile_nothing() -> None:
    """Switch torch's compiler off. A forked job has an environment of its own, which the compiler reads when it is imported."""
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        os.environ[name] = "1"
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.config.disable = True


def adapt_megatron() -> None:
    """Call once, when ``megatron`` can be imported. The only symbols of Megatron that are touched:

    - ``legacy.fused_kernels.load`` compiles CUDA kernels: skipped;
    - ``moe_utils.te_general_gemm`` is missing where TransformerEngine is (a NameError in 0.16): None;
    - ``inference_layers`` (development branch) has two classes that are none without TransformerEngine: empty ones;
    - ``utils.get_te_version`` (0.12) imports TransformerEngine to learn its version: 0;
    - ``fp8_utils`` (0.12) wants TransformerEngine even for an empty list of fp8 parameters: nothing is done for it;
    - ``WrappedTorchNorm`` refuses sequence parallelism: allowed, its parameters tagged as FusedLayerNorm's are;
    - ``DotProductAttention`` refuses context parallelism: keys and values are gathered over the group.
    """
    compile_nothing()
    with contextlib.suppress(ImportError):
        from megatron.legacy import fused_kernels

        fused_kernels.load = _noop()
    with contextlib.suppress(ImportError):
        from megatron.core.transformer.moe import moe_utils

        if not hasattr(moe_utils, "te_general_gemm"):
            moe_utils.te_general_gemm = None
    with contextlib.suppress(ImportError):
        from megatron.core.tensor_parallel import inference_layers

        for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
            if not isinstance(getattr(inference_layers, name, None), type):
                setattr(inference_layers, name, type(name, (), {}))
    with contextlib.suppress(ImportError):
        from megatron.core import fp8_utils

        for name in ("_quantize_param_shard_impl", "_correct_amax_history_if_needed_impl"):
            if hasattr(fp8_utils, name):
                setattr(fp8_utils, name, _noop())
    from megatron.core import parallel_state, utils

    if not hasattr(utils, "HAVE_TE") and importlib.util.find_spec("transformer_engine") is None:
        utils._te_version = utils.PkgVersion("0")
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    make = torch_norm.WrappedTorchNorm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return make(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module = make(cls, plain, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = True
        return module

    torch_norm.WrappedTorchNorm.__new__ = staticmethod(new)

    class GatheringAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(
            self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
        ) -> None:
            self_size = config.context_parallel_size
            if self_size > 1:
                config = copy.copy(config)
                config.context_parallel_size = 1
            super().__init__(config, *args, **kwargs)
            del k_channels  # visible in the query
            if v_channels is not None:  # multi-latent attention, which otherwise needs TransformerEngine
                self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition
            self.context_size = self_size
            if self_size > 1:  # the mask that comes with the batch, not a square one
                self.scale_mask_softmax.attn_mask_type = AttnMaskType.arbitrary

        def forward(self, query: Any, key: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if self.context_size > 1:
                group = parallel_state.get_context_parallel_group()
                key, value = _GatherKeys.apply(key, group), _GatherKeys.apply(value, group)
            return super().forward(query, key, value, mask, *args, **kwargs)

    with contextlib.suppress(ImportError):
        from megatron.core.transformer import multi_latent_attention

        multi_latent_attention.HAVE_TE = False  # it needs a class of TransformerEngine
    import megatron.core.models.gpt.gpt_layer_specs as specs

    specs.DotProductAttention = GatheringAttention
    with contextlib.suppress(ImportError):
        from megatron.core.models import backends

        backends.DotProductAttention = GatheringAttention
