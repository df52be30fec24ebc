"""torch's own PowerSGD hook under DistributedDataParallel: a resumed job goes on bit by bit, although its buckets differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from unickpt.base.errors import ConfigError
from unickpt.training.compression.ddp import CompressedGradients, compressed_gradients
from unickpt.training.compression.settings import Compression
from unickpt.training.compression.torch_powersgd import CarriedPowerSGD, carried_powersgd

GROUPS: list[Any] = []  # kept: a thread of gloo that drops the last reference to its group would wait for itself


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    GROUPS.append(dist.group.WORLD)
    yield
    dist.destroy_process_group()


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh(), torch.nn.Linear(40, 24)]
    return torch.nn.Sequential(*layers)


def _state() -> PowerSGDState:
    return PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)


def _train(module: Any, model: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        inputs = torch.randn(16, 24, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        losses.append(loss.item())
    return losses


def _parallel(module: torch.nn.Module) -> Any:
    return torch.nn.parallel.DistributedDataParallel(module, bucket_cap_mb=0.003)


@pytest.mark.usefixtures("group")
def test_residuals_of_torchs_hook_survive_a_restart() -> None:
    module = _network()
    model, carried = _parallel(module), CarriedPowerSGD(module, _state())
    model.register_comm_hook(carried, carried_powersgd)
    _train(module, model, range(5))
    own, common = carried.to_objects()
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert any(tensor.any() for tensor in own["sent"].values())
    expected = _train(module, model, range(5, 9))

    def resumed(*, drop: bool) -> list[float]:
        again = _network()
        again.load_state_dict(weights)
        model, carried = _parallel(again), CarriedPowerSGD(again, _state())
        model.register_comm_hook(carried, carried_powersgd)
        assert carried.restore(lambda _: {**own, "sent": {}} if drop else own, common)
        return _train(again, model, range(5, 9))

    assert resumed(drop=False) == expected
    assert resumed(drop=True) != expected


@pytest.mark.usefixtures("group")
def test_the_own_hook_is_accepted_by_torch_and_leaves_the_gradients_of_one_rank() -> None:
    module, plain = _network(), _network()
    model = _parallel(module)
    model.register_comm_hook(CompressedGradients(module, Compression("sign")), compressed_gradients)
    assert _train(module, model, range(3)) == _train(plain, plain, range(3))


def test_joined_matrices_are_refused() -> None:
    state = PowerSGDState(None, start_powerSGD_iter=2, batch_tensors_with_same_shape=True)
    with pytest.raises(ConfigError, match="batch_tensors_with_same_shape"):
        CarriedPowerSGD(_network(), state)
