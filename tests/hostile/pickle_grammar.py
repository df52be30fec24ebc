"""Hostile pickles from a grammar: streams of opcodes, ``torch.save`` files and folders of frameworks that contain them.

Everything follows from a ``random.Random``. A stream is built as a value is: containers, numbers, text, calls of names that are
on the list or not, states, memo games, persistent ids. Some streams are cut or changed by a few bytes. Each input goes through
all that a conversion does with a file before it writes.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickletools
import random
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hostile import streams
from tests.hostile.mutation import Target, changed_bytes
from tests.hostile.source_folders import dcp, deepspeed_state, everything, megatron_state
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.format.objects import encode
from unickpt.transform.convert.pickles.lazy_tensor import Located, OpenFiles
from unickpt.transform.convert.pickles.plain_values import NotPlainError, plain
from unickpt.transform.convert.pickles.safe_pickle import load, load_plain

# Pickles may name the first half.
NAMES = [
    "collections OrderedDict", "collections defaultdict", "collections deque", "builtins set", "builtins frozenset",
    "__builtin__ set", "builtins list", "builtins tuple", "builtins dict", "builtins int", "builtins str", "builtins bytearray",
    "builtins complex", "_codecs encode", "datetime timedelta", "torch Size", "torch device", "torch float32", "torch bfloat16",
    "torch FloatStorage", "torch HalfStorage", "torch.storage UntypedStorage", "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter", "torch._tensor _rebuild_from_type_v2",
    "argparse Namespace", "pathlib PosixPath", "_io BytesIO", "numpy dtype", "numpy ndarray",
    "numpy._core.multiarray _reconstruct", "numpy._core.multiarray scalar", "deepspeed.runtime.x Y", "megatron.core.x Y",
    "torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata MetadataIndex",
    "torch.distributed.checkpoint.metadata ChunkStorageMetadata", "torch.serialization _get_layout",
    "os system", "posix system", "builtins exec", "builtins eval", "builtins open", "builtins getattr", "io FileIO",
    "pickle loads", "torch load", "subprocess Popen", "importlib import_module", "collections OrderedDict.__init__",
    "torch._utils _rebuild_qtensor", "copyreg _reconstructor", "functools partial", "operator attrgetter", "shutil rmtree",
]  # fmt: skip
INTEGERS = [
    -(1 << 63),
    -(1 << 31),
    -1,
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    255,
    256,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 61) - 1,
    1 << 62,
    1 << 64,
]
WORDS = [
    "", "x", "state", "module", "param_groups", "../secret", "/etc/passwd", "/proc/self/environ", "latin1", "storage", "0", "1",
    "cpu", "path", "begin_byte", "__class__", "__defaults__", "__dict__", "__setstate__", "fqn", "offsets", "sizes", "\ud800",
    "u4",
]  # fmt: skip
MAX_DEPTH = 5


class Grammar:
    """Return one stream. Memo indices are counted, so that most references are valid.

    Args:
        rng: decides everything.
        memo: values that are there before.
        puts: how often a value is memoized.
    """

    def __init__(self, rng: random.Random, memo: int = 0, puts: float = 0.4) -> None:
        self.rng, self.memo, self._puts = rng, memo, puts
        self._values: list[tuple[float, Callable[[int], bytes]]] = [
            (3, self.scalar), (2, self.items), (2, self.mapping), (1, self.members), (1, self.row), (3, self.call),
            (2, self.state), (2, self.reference), (1, self.name), (1, self.persistent), (2, self.tensor), (0.5, self.noise),
            (0.3, self.doubled), (0.3, self.nested), (1, self.on_a_handle),
        ]  # fmt: skip

    def stream(self) -> bytes:
        rng = self.rng
        body = self.value(0)
        if rng.random() < 0.15:  # values that remain on the stack, operations without operands
            body += b"".join(
                rng.choice([b"0", b"1", b"(", b"e", b"u", b"b", b"R", b"\x81", b"t", b"\x93", b"Q"]) for _ in range(3)
            )
        data = rng.choice([b"", b"\x80\x02", b"\x80\x02", b"\x80\x04", b"\x80\x05", b"\x80\x09"]) + body + b"."
        if rng.random() < 0.1:
            data = data[: rng.randrange(len(data) + 1)]
        return changed_bytes(rng, data) if rng.random() < 0.2 else data

    def value(self, depth: int) -> bytes:
        rng = self.rng
        if depth >= MAX_DEPTH:
            made = self.scalar(depth)
        else:
            weights, makers = zip(*self._values, strict=True)
            made = rng.choices(makers, weights)[0](depth + 1)
        return made + self.put() if rng.random() < self._puts else made

    def put(self) -> bytes:
        rng = self.rng
        index = self.memo
        self.memo += 1
        if rng.random() < 0.03:
            index = rng.choice([0, index + 1, 1 << 20, 1 << 27, (1 << 32) - 1])
        kind = rng.randrange(4)
        if kind == 0 and index < 256:
            return b"q" + bytes([index])
        if kind == 1:
            return b"r" + struct.pack("<I", index)
        return b"p%d\n" % index if kind == 2 else b"\x94"

    def reference(self, _depth: int) -> bytes:
        index = self.rng.randrange(self.memo + 1) if self.rng.random() < 0.95 else 1 << 31
        kind = self.rng.randrange(3)
        if kind == 0 and index < 256:
            return b"h" + bytes([index])
        return b"j" + struct.pack("<I", index) if kind == 1 else b"g%d\n" % index

    def several(self, depth: int) -> list[bytes]:
        return [self.value(depth) for _ in range(self.rng.randrange(4))]

    def scalar(self, _depth: int) -> bytes:
        rng = self.rng
        kind = rng.randrange(8)
        if kind < 3:
            return streams.number(rng.choice(INTEGERS))
        if kind < 5:
            return streams.text(rng.choice(WORDS))
        if kind == 5:
            return rng.choice(
                [b"N", b"\x88", b"\x89", b")", b"]", b"}", b"\x8f", b"I01\n", b"L99999999999L\n", b"F1e999\n", b"Vx\n"]
            )
        if kind == 6:
            return b"G" + struct.pack(">d", rng.choice([0.0, 1.5, float("inf"), float("nan"), 1e308]))
        data = rng.randbytes(rng.randrange(20))
        return rng.choice([b"C" + bytes([len(data)]), b"B" + struct.pack("<I", len(data))]) + data

    def items(self, depth: int) -> bytes:
        values = self.several(depth)
        return self.rng.choice(
            [b"](" + b"".join(values) + b"e", b"(" + b"".join(values) + b"l", b"]" + b"".join(v + b"a" for v in values)]
        )

    def mapping(self, depth: int) -> bytes:
        pairs = b"".join(self.value(depth + 2) + value for value in self.several(depth))
        return self.rng.choice([b"}(" + pairs + b"u", b"(" + pairs + b"d"])

    def members(self, depth: int) -> bytes:
        values = b"".join(self.several(depth + 2))
        return self.rng.choice([b"\x8f(" + values + b"\x90", b"(" + values + b"\x91"])

    def row(self, depth: int) -> bytes:
        count = self.rng.randrange(1, 4)
        values = b"".join(self.value(depth) for _ in range(count))
        return self.rng.choice([b"(" + values + b"t", values + bytes([0x84 + count])])

    def name(self, _depth: int) -> bytes:
        module, name = self.rng.choice(NAMES[:39] if self.rng.random() < 0.85 else NAMES).split(" ")
        if self.rng.random() < 0.5:
            return f"c{module}\n{name}\n".encode()
        return streams.text(module) + streams.text(name) + b"\x93"

    def call(self, depth: int) -> bytes:
        arguments = self.row(depth) if self.rng.random() < 0.8 else self.value(depth)
        callee = self.name(depth) if self.rng.random() < 0.9 else self.value(depth)
        both = callee + arguments
        return self.rng.choices([both + b"R", both + b"\x81", both + self.mapping(depth) + b"\x92"], [6, 3, 1])[0]

    def state(self, depth: int) -> bytes:
        target = self.call(depth) if self.rng.random() < 0.7 else self.value(depth)
        return target + (self.mapping(depth) if self.rng.random() < 0.7 else self.value(depth)) + b"b"

    def persistent(self, depth: int) -> bytes:
        if self.rng.random() < 0.2:
            return self.value(depth) + b"Q"
        kind = self.rng.choice(
            [streams.FLOATS, b"ctorch\nByteStorage\n", b"ctorch.storage\nUntypedStorage\n", self.name(depth)]
        )
        key = streams.text(self.rng.choice(["0", "1", "2", "../0", ""]))
        return (
            streams.many([streams.text("storage"), kind, key, streams.text("cpu"), streams.number(self.rng.choice(INTEGERS))])
            + b"Q"
        )

    def tensor(self, _depth: int) -> bytes:
        rng = self.rng
        ndim = rng.randrange(4)
        small = [0, 1, 1, 2, 2, 3, 4, 8]
        shape, strides = ([rng.choice(small if rng.random() < 0.9 else INTEGERS) for _ in range(ndim)] for _ in range(2))
        after = self.mapping(3) + b"b" if rng.random() < 0.05 else b""
        return streams.tensor(rng.choice([8, 8, 8, 2, 9]), shape, strides, rng.choice([0, 0, 0, 1, 7, 1 << 61]), after=after)

    def on_a_handle(self, depth: int) -> bytes:
        """Return a storage reference that is changed by a state, items, or a call."""
        handle = self.rng.choice([self.tensor, self.persistent, self.name])(depth)
        change = self.rng.choice([b"b", b"a", b"s", b"(%be", b"(%bu", b"(%b\x90", b"R", b"\x81"])
        value = self.value(depth)
        return handle + (change % value if b"%b" in change else (value * 2 if change == b"s" else value) + change)

    def doubled(self, _depth: int) -> bytes:
        levels, first = self.rng.choice([5, 20, 60]), self.memo
        body = b"]r" + struct.pack("<I", first)
        for level in range(levels):
            before = b"j" + struct.pack("<I", first + level)
            joined = self.rng.choice(
                [
                    b"](" + before * 2 + b"e",
                    before * 2 + b"\x86",
                    b"}(" + streams.text("a") + before + streams.text("b") + before + b"u",
                ]
            )
            body += joined + b"r" + struct.pack("<I", first + level + 1)
        self.memo += levels + 1
        return body if self.rng.random() < 0.8 else b"}" + body + b"Ns"

    def nested(self, _depth: int) -> bytes:
        count = self.rng.choice([50, 99, 101, 1000, 30_000])
        return self.rng.choice(
            [b")" + b"\x85" * count, b"]" * count + b"a" * (count - 1), b"(" * count, b"})" + b"\x85" * count + b"Ns"]
        )

    def noise(self, _depth: int) -> bytes:
        return self.rng.choice(
            [b"\x82\x01", b"P0\n", b"(ios\nsystem\n", b"(cos\nsystem\no", b"2", b"\x97", b"\x98", self.rng.randbytes(3)]
        )


# ---------------------------------------------------------------- what they are thrown at


class PickleAttacker:
    """Hostile files and folders, and all operations on them. Nothing outside ``work`` may be opened.

    Args:
        work: folder that does not exist yet.
    """

    NAMES = (
        "pickle, by grammar",
        "torch.save file, bytes",
        "DCP table, bytes",
        "DCP chunk, bytes",
        "state dict, by grammar",
    )

    def __init__(self, work: Path) -> None:
        work.mkdir(parents=True)
        self.work = work
        buffers = []
        for state in (deepspeed_state(), megatron_state()):
            buffer = io.BytesIO()
            torch.save(state, buffer)
            buffers.append(buffer.getvalue())
        self._files = buffers
        self._dcp = dcp(work / "dcp")
        self._table = (self._dcp / ".metadata").read_bytes()
        (self._chunk,) = self._dcp.glob("*.distcp")
        self._chunk_bytes = self._chunk.read_bytes()
        self._deepspeed = work / "deepspeed" / "mp_rank_00_model_states.pt"
        self._megatron = work / "megatron" / "mp_rank_00" / "model_optim_rng.pt"
        for path in (self._deepspeed, self._megatron):
            path.parent.mkdir(parents=True)
        self._path = work / "file.pt"

    @property
    def targets(self) -> dict[str, Target]:
        """Return the operations by name, in the order of ``NAMES``."""
        return {
            "pickle, by grammar": Target(lambda rng: Grammar(rng).stream(), self.use_stream),
            "torch.save file, bytes": Target(lambda rng: changed_bytes(rng, rng.choice(self._files)), self.use_file),
            "DCP table, bytes": Target(lambda rng: changed_bytes(rng, self._table), self.use_table),
            "DCP chunk, bytes": Target(self.changed_chunk, self.use_chunk),
            "state dict, by grammar": Target(self.changed_state, self.use_state),
        }

    def changed_chunk(self, rng: random.Random) -> bytes:
        """Return a DCP chunk of the size in the table."""
        data = bytearray(changed_bytes(rng, self._chunk_bytes))
        size = len(self._chunk_bytes)
        return bytes(data[:size]) + bytes(max(size - len(data), 0))

    def changed_state(self, rng: random.Random) -> tuple[Path, bytes]:
        """Return a valid state dict with one member whose pickle comes from the grammar."""
        state, path = rng.choice([(deepspeed_state(), self._deepspeed), (megatron_state(), self._megatron)])
        holder: Any = state
        while True:
            members = vars(holder) if hasattr(holder, "__dict__") and not isinstance(holder, dict) else holder
            key = rng.choice(list(members))
            inner = members[key]
            if rng.random() < 0.5 or not (isinstance(inner, dict) and inner):
                break
            holder = inner
        marker = "a place for a hostile value"
        members[key] = marker
        buffer = io.BytesIO()
        torch.save(state, buffer, pickle_protocol=2)
        with zipfile.ZipFile(buffer) as file:
            members_of = {name: file.read(name) for name in file.namelist()}
        (name,) = [name for name in members_of if name.endswith("data.pkl")]
        before, _, after = members_of[name].partition(streams.text(marker))
        there = sum(code.name in ("BINPUT", "LONG_BINPUT") for code, _, _ in pickletools.genops(before + b"."))
        members_of[name] = before + Grammar(rng, there, puts=0).value(1) + after
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            for each, data in members_of.items():
                file.writestr(each, data)
        return path, out.getvalue()

    def use_stream(self, data: bytes) -> None:
        """Yield the pickle as a ``torch.save`` file, and as a plain pickle."""
        with OpenFiles() as files:
            refused: list[UnickptError] = []
            for way in (lambda: load(streams.archive(self._path, data), files), lambda: load_plain(data, self._path, files)):
                try:
                    walk(way())
                except UnickptError as err:
                    refused.append(err)
                files.close()
            if refused:
                raise refused[0]

    def use_file(self, data: bytes) -> None:
        self._path.write_bytes(data)
        with OpenFiles() as files:
            walk(load(self._path, files))

    def use_table(self, data: bytes) -> None:
        self._chunk.write_bytes(self._chunk_bytes)
        (self._dcp / ".metadata").write_bytes(data)
        everything(self._dcp)

    def use_chunk(self, data: bytes) -> None:
        (self._dcp / ".metadata").write_bytes(self._table)
        self._chunk.write_bytes(data)
        everything(self._dcp)

    def use_state(self, made: tuple[Path, bytes]) -> None:
        path, data = made
        path.write_bytes(data)
        everything(self.work / ("deepspeed" if path == self._deepspeed else "megatron"))


class Watch:
    """An audit hook that records forbidden operations. Python cannot remove audit hooks, so a process has one."""

    FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pickle.find_class", "os.remove", "os.rename",
                 "os.rmdir", "os.link", "os.symlink", "socket.connect", "exec", "compile", "shutil.rmtree")  # fmt: skip

    def __init__(self) -> None:
        self._inside: str | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._event)

    def _event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._inside is None:
            return
        if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if path != self._inside and not path.startswith(f"{self._inside}/"):
                self.seen.append(f"opened {path}")
        elif event in self.FORBIDDEN:
            self.seen.append(f"{event}{arguments!r:.200}")

    @contextlib.contextmanager
    def below(self, folder: Path) -> Iterator[None]:
        """Allow opening only files below a folder in this block. Raises AssertionError otherwise."""
        self.seen.clear()
        self._inside = os.path.realpath(folder)
        try:
            yield
        finally:
            self._inside = None
        assert not self.seen, f"outside of {folder}: {self.seen[:3]}"


def walk(value: Any) -> None:
    """Do what conversions do with a value: make it plain, read its tensors, encode it."""
    try:
        encode(plain(value), prefix="objects")
    except NotPlainError:
        return
    if isinstance(value, Located):
        value.read()
