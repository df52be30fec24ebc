"""Hostile bytes: what is sound, changed by chance. Everything follows from a ``random.Random``."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support import handmade
from tests.support.handmade import IndexParts, digest, join_safetensors, replace_file, split_safetensors
from unickpt.base.errors import UnickptError
from unickpt.checkpoint.format import index_codec, manifest, objects
from unickpt.checkpoint.format.index import check_coverage
from unickpt.checkpoint.format.safetensors_header import parse_header
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.verify import verify_checkpoint

ALLOWANCE_BYTES = 384 << 20  # of address space over what the process has; a lie about sizes asks for gigabytes

NUMBERS = [
    -(2**63), -1, 0, 1, 2, 3, 7, 8, 31, 32, 33, 64, 65, 255, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**60, 2**61,
    2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, 10**400,
]  # fmt: skip
WORDS = [
    "", ".", "..", "../x", "/etc/passwd", "a\0b", "\ud800", "x" * 300, "é", "data", "unickpt", "unickpt-index", "object",
    "parameter", "weight", "master", "objects/job/0", "objects/rank00000", "index.safetensors", "data/rank00000.safetensors",
    *(f"F{n}" for n in (16, 32, 64)), "BF16", "I32", "I64", "U8", "BOOL", "inf", "nan", "<f4", "O", "torch.float32",
    "xxh3_128:",
]  # fmt: skip
TAGS = [
    "$tuple", "$set", "$frozenset", "$dict", "$ordered", "$int", "$float", "$complex", "$bytes", "$size", "$dtype", "$device",
    "$namespace", "$path", "$datetime", "$enum", "$tensor", "$ndarray", "$numpy", "$opaque", "$lost", "$unknown", "$",
]  # fmt: skip
TOKENS = [
    b"{}", b"[]", b"null", b"true", b"1e999", b"-0", b"NaN", b'"', b"\\u0000", b"\\ud800", b"\xff", b"\0", b",", b":", b"]",
    b"}", b"[" * 40, b'{"":' * 40, b"9" * 30, b"9" * 5000, b" ", b"\xef\xbb\xbf",
]  # fmt: skip

_PARTICULARS = re.compile(r"""'[^']*'|"[^"]*"|[(\[{].*|[-\d][\d,.e+]*""", re.S)


# ---------------------------------------------------------------- JSON


def any_json(rng: random.Random, depth: int = 3) -> Any:
    """A small value; objects are often tags of the codec."""
    kind = rng.randrange(8 if depth else 5)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind in (1, 2):
        return rng.choice(NUMBERS) if rng.random() < 0.7 else rng.choice([0.5, 1e308, -1.5, 3.0])
    if kind in (3, 4):
        return rng.choice(WORDS)
    if kind == 5:
        return [any_json(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 6:
        return {rng.choice(TAGS): any_json(rng, depth - 1)}
    return {rng.choice(WORDS): any_json(rng, depth - 1) for _ in range(rng.randrange(3))}


def nested(rng: random.Random) -> str:
    """A word that ``text_of`` writes as many lists, objects or tags, one in another: around the limits of codec and JSON."""
    return f"NEST:{rng.choice([5, 60, 127, 128, 129, 255, 256, 257, *range(860, 1000)])}:{rng.randrange(len(_WRAPS))}"


_WRAPS = ((b"[", b"]"), (b'{"k":', b"}"), (b'{"$tuple":[', b"]}"), (b'{"$dict":[[1,', b"]]}"))
_NEST = re.compile(rb'"NEST:(\d+):(\d)"')


def text_of(value: Any) -> bytes:
    """JSON without white space, its members sorted, with what is nested written out: no writer of JSON goes so deep."""

    def written(found: re.Match[bytes]) -> bytes:
        depth, (begin, end) = int(found[1]), _WRAPS[int(found[2])]
        return begin * depth + b"1" + end * depth

    return _NEST.sub(written, json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def _paths(value: Any, prefix: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in members:
        yield (*prefix, key)
        yield from _paths(item, (*prefix, key))


def _copied(value: Any) -> Any:
    return json.loads(json.dumps(value))


def changed_json(rng: random.Random, value: Any) -> Any:
    """A copy with one to three members replaced, removed, doubled, renamed, moved or wrapped."""
    value = _copied(value)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        paths = list(_paths(value))
        if not paths:
            return any_json(rng)
        *parents, last = rng.choice(paths)
        holder = value
        for key in parents:
            holder = holder[key]
        kind = rng.randrange(10)
        if kind < 5:
            holder[last] = any_json(rng)
        elif kind == 5:
            del holder[last]
        elif kind == 6 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), _copied(holder[last]))
        elif kind == 6:
            holder[rng.choice([*WORDS, *TAGS])] = holder.pop(last)
        elif kind == 7:
            *others, other = rng.choice(paths)
            source = value
            for key in others:
                source = source[key]
            holder[last] = _copied(source[other])
        elif kind == 8:
            holder[last] = [holder[last]]
        elif rng.random() < 0.2:
            holder[last] = nested(rng)
        elif type(holder[last]) is int:
            holder[last] += rng.choice([-8, -1, 1, 8])
    return value


# ---------------------------------------------------------------- bytes


def changed_bytes(rng: random.Random, data: bytes) -> bytes:
    """A copy with one to four places flipped, overwritten, cut, doubled or filled with tokens."""
    content = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 3, 4])):
        if not content:
            return bytes(content)
        at = rng.randrange(len(content))
        kind = rng.randrange(9)
        if kind < 2:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, *b'{}[],:"0'])
        elif kind == 3:
            del content[at : at + rng.choice([1, 2, 8, 100])]
        elif kind == 4:
            content[at:at] = rng.choice(TOKENS)
        elif kind == 5:
            piece = content[at : at + rng.choice([1, 8, 40, 200])]
            content[at:at] = piece * rng.choice([1, 2, 10])
        elif kind == 6:
            numbers = list(re.finditer(rb"\d+", content))
            if numbers:
                found = rng.choice(numbers)
                content[found.start() : found.end()] = str(rng.choice(NUMBERS)).encode()
        elif kind == 7:
            content[at : at + 8] = (rng.choice(NUMBERS) % 2**64).to_bytes(8, "little")
        else:
            del content[at:]
    return bytes(content)


# ---------------------------------------------------------------- what they are thrown at


def kind_of(err: UnickptError) -> str:
    """A refusal without the numbers and names in it, to count how many different ones were met."""
    return f"{type(err).__name__}: {_PARTICULARS.sub('_', str(err))[:60]}"


@dataclass(frozen=True)
class Target:
    """How one hostile input is made, and how it is used. Nothing but ``UnickptError`` may come out of ``use``."""

    make: Callable[[random.Random], Any]
    use: Callable[[Any], None]


class Attacker:
    """Makes hostile inputs from a sound checkpoint, and signs them where there is something to sign.

    Args:
        sound: a checkpoint by ``handmade.save_ranks``.
        work: a directory that does not exist yet, for a copy of it.
    """

    def __init__(self, sound: Path, work: Path) -> None:
        self.sound, self.work = sound, Path(shutil.copytree(sound, work))
        self.manifest = (sound / "manifest.json").read_bytes()
        self.body = handmade.read_manifest(sound)
        self.parts = IndexParts(sound)
        self.files = {record["path"]: (sound / record["path"]).read_bytes() for record in self.body["files"]}
        self.tensors = {"objects/job/0": torch.arange(5, dtype=torch.float64)}
        self.changed: set[str] = set()

    NAMES = (
        "manifest, bytes", "manifest, members (signed)", "safetensors header, bytes", "safetensors header, members",
        "index, bytes", "index, cells and tables", "objects", "a checkpoint's directory",
    )  # fmt: skip

    @property
    def targets(self) -> dict[str, Target]:
        """By name, in the order of ``NAMES``."""
        return {
            "manifest, bytes": Target(lambda rng: changed_bytes(rng, self.manifest), self.use_manifest),
            "manifest, members (signed)": Target(self.signed_manifest, self.use_manifest),
            "safetensors header, bytes": Target(self.header_bytes, self.use_header),
            "safetensors header, members": Target(self.header_members, self.use_header),
            "index, bytes": Target(lambda rng: changed_bytes(rng, self.files[self.parts.path]), self.use_index),
            "index, cells and tables": Target(self.index_parts, self.use_index),
            "objects": Target(self.object_text, self.use_objects),
            "a checkpoint's directory": Target(self.directory, use),
        }

    def signed_manifest(self, rng: random.Random) -> bytes:
        """Members changed, the checksum right."""
        body = changed_json(rng, self.body)
        if not isinstance(body, dict):
            return text_of(body)
        body.pop("checksum", None)
        text = text_of(body)
        sign = f'"checksum":"{digest(text)}"'.encode()
        return text[:-1] + (b"," if body else b"") + sign + b"}"

    def header_bytes(self, rng: random.Random) -> bytes:
        return changed_bytes(rng, rng.choice(list(self.files.values())))

    def header_members(self, rng: random.Random) -> bytes:
        header, data = split_safetensors(rng.choice(list(self.files.values())))
        return join_safetensors(text_of(changed_json(rng, header)), data)

    def index_parts(self, rng: random.Random) -> bytes:
        """Cells, rows, widths, or one of the tables."""
        parts = copy.copy(self.parts)
        parts.columns = {name: column.copy() for name, column in parts.columns.items()}
        parts.metadata, parts.files, parts.tensors = dict(parts.metadata), list(parts.files), list(parts.tensors)
        kind = rng.randrange(8)
        if kind < 4:
            for _ in range(rng.choice([1, 1, 2, 4])):
                column = parts.columns[rng.choice(list(parts.columns))].reshape(-1)
                limits = np.iinfo(column.dtype)
                number = (
                    rng.choice(NUMBERS) if rng.random() < 0.5 else int(rng.choice(column.tolist())) + rng.choice([-1, 0, 1])
                )
                column[rng.randrange(len(column))] = min(max(number, int(limits.min)), int(limits.max))
        elif kind == 4:  # columns of some rows, all of the same or each of its own
            alike = rng.random() < 0.5
            rows = [rng.randrange(1000) for _ in range(rng.randrange(20))]
            for name, column in parts.columns.items():
                if alike or rng.random() < 0.5:
                    chosen = rows if alike else [rng.randrange(1000) for _ in range(rng.randrange(20))]
                    parts.columns[name] = column[np.array(chosen, np.int64) % len(column)] if len(column) else column
        elif kind == 5:
            name = rng.choice(list(parts.columns))
            column = parts.columns[name]
            change = rng.randrange(4)
            if change == 0:
                parts.columns[name] = column.astype(rng.choice([np.uint8, np.uint16, np.uint32, np.int32, np.int64, np.uint64]))
            elif change == 1:
                parts.columns[name] = np.resize(column, (len(column), rng.choice([0, 1, 2, 3, 31, 32, 33])))
            elif change == 2:
                del parts.columns[name]
            else:
                parts.columns[f"start.{rng.randrange(40)}"] = column
        header, data = split_safetensors(parts.to_bytes())
        if kind == 6:
            header["__metadata__"]["files"] = text_of(changed_json(rng, parts.files)).decode()
        elif kind == 7:
            header["__metadata__"]["tensors"] = text_of(changed_json(rng, parts.tensors)).decode()
        return join_safetensors(header, data)

    def object_text(self, rng: random.Random) -> bytes:
        value = changed_json(rng, self.body["objects"]) if rng.random() < 0.5 else any_json(rng, 5)
        return text_of([value, nested(rng)] if rng.random() < 0.05 else value)

    def directory(self, rng: random.Random) -> Path:
        """One file changed and, as an attacker would, signed."""
        for name in self.changed:
            shutil.copyfile(self.sound / name, self.work / name)
        name = rng.choice(["manifest.json", *self.files])
        self.changed = {name, "manifest.json"}
        if name == "manifest.json":
            made = self.signed_manifest(rng) if rng.random() < 0.8 else changed_bytes(rng, self.manifest)
            (self.work / name).write_bytes(made)
        elif name == self.parts.path and rng.random() < 0.7:
            replace_file(self.work, name, self.index_parts(rng))
        else:
            replace_file(self.work, name, changed_bytes(rng, self.files[name]))
        return self.work

    @staticmethod
    def use_manifest(data: bytes) -> None:
        found = manifest.from_bytes(data, where="fuzz")
        manifest.from_bytes(manifest.to_bytes(found), where="fuzz, written again")

    @staticmethod
    def use_header(data: bytes) -> None:
        parse_header(data, file_bytes=len(data), where="fuzz")

    @staticmethod
    def use_index(data: bytes) -> None:
        found = index_codec.from_bytes(data, where="fuzz")
        check_coverage(found)
        index_codec.from_bytes(index_codec.to_bytes(found), where="fuzz, written again")

    def use_objects(self, text: bytes) -> None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):  # as loading does
            return
        objects.decode(value, tensors=self.tensors, where="fuzz")


def use(directory: Path) -> None:
    """Everything that loading and verifying do with a checkpoint; both are done before the first refusal is raised."""
    refused: list[UnickptError] = []
    for way in (verify_checkpoint, load_everything):
        try:
            way(directory)
        except UnickptError as err:
            refused.append(err)
    if refused:
        raise refused[0]


def load_everything(directory: Path) -> None:
    """All that loading does with a checkpoint."""
    checkpoint = Checkpoint.open(directory)
    for info in checkpoint.index.tensors:
        checkpoint.read_tensor(info.name, info.state)
    checkpoint.objects()
    for rank in range(3):
        checkpoint.rank_objects(rank)


@contextlib.contextmanager
def limited_memory(allowance_bytes: int = ALLOWANCE_BYTES) -> Iterator[None]:
    """Address space for so many bytes more than there is now: numpy, torch and python all feel it."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + allowance_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
