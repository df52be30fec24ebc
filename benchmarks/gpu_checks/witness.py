"""What the witness needs of a device: the same hash as on the host, its cost, and operators that repeat. One rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_checks.place import Place
from benchmarks.gpu_checks.rows import Rows
from unickpt.training.witness.counting import Counters, all_finite
from unickpt.training.witness.hashes import hashes

ROWS = ("the same hash as on the host", "hash of memory", "attention repeats", "nonfinite in a step")
BACKENDS = (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
REPEATS = 20


def check(place: Place, path: Path) -> None:
    """Make all checks of this group."""
    rows = Rows(path, "witness", place.name)
    generator = torch.Generator(place.device).manual_seed(1)
    with rows.row(ROWS[0], "equal, for each dtype") as row:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensor = torch.randn(1 << 20, generator=generator, device=place.device).to(dtype)
            row.require(torch.equal(hashes([tensor]), hashes([tensor.cpu()])), f"another hash of {dtype}")
    with rows.row(ROWS[1]) as row:
        tensor = torch.randn(1 << (22 if place.dry else 28), generator=generator, device=place.device)
        copy = torch.empty_like(tensor)
        ms, ms_copy = _ms(place, lambda: hashes([tensor])), _ms(place, lambda: copy.copy_(tensor))
        row.values = {"GB": tensor.nbytes / 1e9, "ms": ms, "copy on the device ms": ms_copy, "copies": ms / ms_copy}
    with rows.row(ROWS[2]) as row:
        dtype = torch.float32 if place.dry else torch.bfloat16
        shape = (2, 4, 128, 64) if place.dry else (4, 16, 2048, 128)
        inputs = [torch.randn(shape, generator=generator, device=place.device, dtype=dtype) for _ in range(3)]
        row.values = {backend.name: _repeats(backend, inputs) for backend in BACKENDS}
    with rows.row(ROWS[3]) as row:
        width, count = (256, 256) if place.dry else (4096, 8192)
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, device=place.device) for _ in range(8)))
        inputs = [torch.randn(count, width, generator=generator, device=place.device)]
        row.values = _nonfinite(place, model, inputs[0])


def _ms(place: Place, action: Callable[[], object]) -> float:
    """Return the median time, after a first call that does not count."""
    times = []
    for _ in range(4):
        _wait(place)
        begin = time.perf_counter()
        action()
        _wait(place)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[1:])


def _wait(place: Place) -> None:
    if not place.dry:
        torch.cuda.synchronize()


def _repeats(backend: SDPBackend, given: list[torch.Tensor]) -> str:
    """Return whether output and gradients of attention have the same bits each time."""
    found = set()
    for _ in range(REPEATS):
        inputs = [each.detach().requires_grad_() for each in given]
        try:
            with sdpa_kernel(backend):
                output = scaled_dot_product_attention(*inputs, is_causal=True)
        except RuntimeError:  # no such kernel for this device or shape
            return "not here"
        output.backward(torch.ones_like(output))
        gradients = [each.grad for each in inputs if each.grad is not None]
        found.add(tuple(hashes([output.detach(), *gradients]).tolist()))
    return "repeats" if len(found) == 1 else f"{len(found)} results of {REPEATS}"


def _nonfinite(place: Place, model: torch.nn.Module, inputs: torch.Tensor) -> dict[str, float | int | str]:
    def step() -> None:
        model(inputs).square().mean().backward()

    without = _ms(place, step)
    counters = Counters(model)

    def counted() -> None:
        step()
        assert counters.found(lambda: all_finite(each.grad for each in model.parameters())) is None
        counters.clear()

    try:
        with_counters = _ms(place, counted)
    finally:
        counters.close()
    return {"ms": with_counters, "ms without": without, "ratio": with_counters / without}
