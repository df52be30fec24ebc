"""Communication hook of torch's ``DistributedDataParallel``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from unickpt.training.compression.exchange import GradientExchange
from unickpt.training.compression.settings import Compression
from unickpt.training.compression.wire import GroupWire


class CompressedGradients(GradientExchange):
    """State of ``compressed_gradients``: the exchange, with the names of the parameters.

    Example:
        Compress the gradients of a model to their signs, and keep the residuals in a checkpoint::

            model = DistributedDataParallel(module)
            compressed = CompressedGradients(module, Compression("sign"))
            model.register_comm_hook(compressed, compressed_gradients)
            ...
            unickpt.save_checkpoint(
                state, "out/step100",
                objects={"compression": compressed.common.to_object()},
                rank_objects={"compression": compressed.residuals.to_object()},
            )
            # later, on any number of ranks
            checkpoint = unickpt.Checkpoint.open("out/step100")
            compressed.restore(
                lambda rank: checkpoint.rank_objects(rank).value["compression"],
                checkpoint.objects().value["compression"],
            )
    """

    def __init__(self, module: torch.nn.Module, settings: Compression, group: dist.ProcessGroup | None = None) -> None:
        """Name the parameters.

        Args:
            module: the module inside ``DistributedDataParallel``.
            settings: scheme and parameters.
            group: the process group of ``DistributedDataParallel``.
        """
        super().__init__(settings, GroupWire(group))
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    def reduce(self, bucket: GradBucket) -> torch.Tensor:
        """Replace the gradients of a bucket by their mean."""
        names = [self._names[id(parameter)] for parameter in bucket.parameters()]
        self.exchange(list(zip(names, bucket.gradients(), strict=True)))
        buffer: torch.Tensor = bucket.buffer()
        return buffer


def compressed_gradients(state: CompressedGradients, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Exchange the gradients of a bucket in compressed form. Pass it to ``register_comm_hook``.

    With gloo the call returns when the exchange is over, so it does not run beside the backward pass.
    """
    buffer = state.reduce(bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


# register_comm_hook compares the annotations with these types, not with their names
compressed_gradients.__annotations__ = {
    "state": CompressedGradients,
    "bucket": GradBucket,
    "return": torch.futures.Future[torch.Tensor],
}
