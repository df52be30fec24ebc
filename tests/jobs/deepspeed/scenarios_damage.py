"""Damaged checkpoints: every rank raises, with the message that a user gets."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.jobs.deepspeed.damaged_checkpoints import assert_refused, data, rewrite
from tests.jobs.deepspeed.scenario_worker import scenario
from unickpt.checkpoint.format.manifest import FORMAT_VERSION


@scenario(2)
def no_manifest(folder: Path) -> None:
    assert_refused(folder, "no manifest.json, so this is not a checkpoint", lambda d: (d / "manifest.json").unlink())


@scenario(2)
def manifest_of_a_newer_format(folder: Path) -> None:
    assert_refused(
        folder,
        f"format version 99, this release reads up to {FORMAT_VERSION}; upgrade unickpt",
        lambda d: rewrite(d, lambda m: m.update(version=99)),
    )


@scenario(2)
def a_flipped_bit_in_the_manifest(folder: Path) -> None:
    def damage(directory: Path) -> None:
        path = directory / "manifest.json"
        path.write_text(path.read_text().replace('"step": 1', '"step": 3'))

    assert_refused(folder, "the checksum does not match the content", damage)


@scenario(2)
def a_truncated_data_file(folder: Path) -> None:
    def damage(directory: Path) -> None:
        data(directory).write_bytes(data(directory).read_bytes()[:-64])

    assert_refused(folder, r"rank00000.safetensors has [\d,]+ bytes, expected [\d,]+", damage)


@scenario(2)
def a_missing_data_file(folder: Path) -> None:
    assert_refused(
        folder,
        "rank00001.safetensors is missing.*Resume from one of them|is missing.*Copy the files back",
        lambda d: data(d, 1).unlink(),
    )


@scenario(2)
def a_flipped_bit_in_a_data_file(folder: Path) -> None:
    def damage(directory: Path) -> None:
        content = bytearray(data(directory).read_bytes())
        content[len(content) // 2] ^= 16
        data(directory).write_bytes(content)

    assert_refused(
        folder, r"rank00000.safetensors: checksum of \S+ \(\w+\) \[.*differs from the index|rank . could not load", damage
    )


@scenario(2)
def a_flipped_bit_in_the_index(folder: Path) -> None:
    def damage(directory: Path) -> None:
        path = directory / "index.safetensors"
        content = bytearray(path.read_bytes())
        content[-9] ^= 1
        path.write_bytes(content)

    assert_refused(folder, "index.safetensors: checksum differs", damage)


@scenario(2)
def a_manifest_that_names_a_file_outside_its_directory(folder: Path) -> None:
    def damage(directory: Path) -> None:
        rewrite(directory, lambda m: m["files"][0].update(path="../../good/secret"))

    assert_refused(folder, r"file path '../../good/secret' is not a plain path inside the checkpoint directory", damage)


@scenario(2)
def a_link_to_a_file_outside_the_checkpoint(folder: Path) -> None:
    def damage(directory: Path) -> None:
        elsewhere = directory.parent.parent / "elsewhere"
        shutil.move(data(directory), elsewhere)
        data(directory).symlink_to(elsewhere)

    assert_refused(folder, "leads outside", damage)


@scenario(2)
def a_header_with_wrong_sizes(folder: Path) -> None:
    def damage(directory: Path) -> None:
        content = data(directory).read_bytes()
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        wrong = header.replace(b'"shape":[', b'"shape":[9', 1)[: len(header)]
        data(directory).write_bytes(content[:8] + wrong + content[8 + len(header) :])

    assert_refused(folder, "checksum of the safetensors header differs from the manifest|rank . could not load", damage)
