"""A rank of a job in which one rank does not come to the first collective: ``start_worker.py FOLDER FAULT RANK``.

What is named for a fault is the function that the rank hangs in. Each rank notes the time at which it begins to wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import socket
import sys
import time
from pathlib import Path

FOLDER, FAULT, RANK = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
own = int(os.environ["RANK"])


def note(words: str) -> None:
    with (FOLDER / "waits").open("a") as file:
        file.write(f"{time.time():.3f} {own} {os.getpid()} {words}\n")


def load_data() -> None:
    while True:
        time.sleep(1)


if own == RANK and FAULT == "early":
    note("hangs")
    load_data()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def take_lock() -> None:
    with (FOLDER / "data.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def download() -> None:
    with socket.create_connection(("127.0.0.1", int((FOLDER / "port").read_text()))) as server:
        server.recv(1)


def compile_extension() -> None:
    from torch.utils.cpp_extension import load

    load("slow_kernel", [str(FOLDER / "slow_kernel.cpp")], build_directory=str(FOLDER / "build"))


def read_mount() -> None:
    with (FOLDER / "pipe").open("rb") as file:
        file.read(1)


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def call_native_code() -> None:
    library = ctypes.PyDLL(None)  # keeps the interpreter's lock
    while True:
        library.sleep(1000)


def forget_to_join() -> None:
    total = 0.0
    while True:
        total += float(torch.ones(1000).sum())


def die() -> None:
    os._exit(3)


def hang() -> None:
    note("hangs")
    {
        "data": load_data,
        "lock": take_lock,
        "download": download,
        "compile": compile_extension,
        "mount": read_mount,
        "stopped": stop_here,
        "native": call_native_code,
        "never": forget_to_join,
        "dead": die,
        "deepspeed": load_data,
        "megatron": load_data,
    }[FAULT]()


def with_deepspeed() -> None:
    import deepspeed

    deepspeed.init_distributed("gloo", verbose=False)
    if own == RANK:
        hang()
    note("waits")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    deepspeed.initialize(model=torch.nn.Linear(8, 8), config=config)
    dist.barrier()


def with_megatron() -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    if own == RANK:
        hang()
    note("waits")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    dist.barrier()


def with_torch() -> None:
    if own == RANK:
        hang()
    note("waits")
    dist.init_process_group("gloo")
    dist.barrier()


{"deepspeed": with_deepspeed, "megatron": with_megatron}.get(FAULT, with_torch)()
