"""Checkpoints made of others: every tensor bit for bit against torch, and what must not be made."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.handmade import COUNT, EMBED, MASTER, MOMENT, embed, master, moment, save_ranks, weight
from tests.support.llama import FACTS, HF, LLAMA, Values, saved, values_of
from unickpt.base.errors import LanguageError, MismatchError, UnickptError
from unickpt.checkpoint.format.boxes import Box
from unickpt.checkpoint.format.index import check_coverage
from unickpt.checkpoint.format.layout import ROWS_FOLDER
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.checkpoint.load.diff import differences
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.cli.main import main
from unickpt.transform.convert import pipeline
from unickpt.transform.convert.pipeline import convert
from unickpt.transform.dialects.dialect import parse
from unickpt.transform.dialects.translated_checkpoint import translated
from unickpt.transform.edit.apply_dialect import Translate
from unickpt.transform.edit.average import Average
from unickpt.transform.edit.cast import Cast
from unickpt.transform.edit.merge_lora import LoraConfig, MergeLora, _grid
from unickpt.transform.edit.patterns import Selection
from unickpt.transform.edit.rename import Rename, Renaming
from unickpt.transform.edit.resize_vocab import Resize
from unickpt.transform.edit.select import Drop, NoOptimizer
from unickpt.transform.edit.table import Step, Table, table_of
from unickpt.transform.edit.write import after, source_of

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj.weight"  # of which the weight is not the cast of its master in three elements
TIED = {HEAD: EMBEDDING}
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def handmade(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An overridden weight, a tied name, a buffer of no dimension, an empty tensor, objects with tensors and pickles."""
    return save_ranks(tmp_path_factory.mktemp("edit") / "handmade", 2)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Values]:
    """All states of all parameters of a small model."""
    values = values_of(HF)
    folder = tmp_path_factory.mktemp("edit") / "llama"
    return saved(folder, values, aliases=TIED, model={"family": "llama", "facts": {**FACTS, "vocab": 7}}), values


def drop(*patterns: str) -> Drop:
    return Drop(tuple(map(Selection.parse, patterns)))


def rename(*texts: str) -> Rename:
    return Rename(tuple(map(Renaming.parse, texts)))


def made(source: Path | Checkpoint, folder: Path, *steps: Step, **options: Any) -> Checkpoint:
    """Written, opened, and checked for holes and overlaps."""
    table = after(table_of(source if isinstance(source, Checkpoint) else Checkpoint.open(source)), steps)
    convert(source_of(table, steps, **options), folder)
    found = Checkpoint.open(folder)
    check_coverage(found.index)
    return found


def assert_holds(found: Checkpoint, expected: Values) -> None:
    """These tensors and no others, in type, shape and every bit."""
    states = {info.key: info for info in found.index.tensors if info.kind != "object"}
    assert states.keys() == expected.keys()
    for key, value in expected.items():
        got = found.read_tensor(*key)
        assert (got.dtype, got.shape) == (value.dtype, value.shape), key
        assert torch.equal(got.reshape(-1).view(torch.uint8), value.reshape(-1).contiguous().view(torch.uint8)), key


HANDMADE: Values = {
    MASTER.key: master(), MOMENT.key: moment(), ("layer.weight", "weight"): weight(), EMBED.key: embed(),
    ("norm.count", "weight"): torch.tensor(42), ("empty.weight", "weight"): torch.empty(0, 4),
}  # fmt: skip


# ---------------------------------------------------------------- choosing


def test_nothing_else_changes(handmade: Path, tmp_path: Path) -> None:
    found, before = made(handmade, tmp_path / "a", rename("embed.*=tokens.*")), Checkpoint.open(handmade)
    expected = {("tokens.weight" if name == "embed.weight" else name, state): v for (name, state), v in HANDMADE.items()}
    assert_holds(found, expected)
    info = found.info("layer.weight", "weight")
    assert info is not None
    assert info.derived_from == "master"
    assert found.override_boxes(found.ids[info.key]) == [Box((3, 0), (1, 6))], "what differs of it, and no more"
    manifest = found.manifest
    assert (manifest.step, manifest.optimizer) == (before.manifest.step, before.manifest.optimizer)
    assert manifest.aliases == {"head.weight": "tokens.weight"}
    assert manifest.excluded == ("frozen.weight",)
    ours, theirs = found.objects(allow_pickle=True), before.objects(allow_pickle=True)
    note = ours.value.pop("edits")
    assert torch.equal(ours.value.pop("history"), theirs.value.pop("history"))
    assert ours.value == theirs.value, "a pickle too, which nobody has opened on the way"
    assert note[0]["done"] == ["1 name changed, with all their states"]
    for rank in (0, 1):
        one, other = (each.rank_objects(rank).value["rng"] for each in (found, before))
        assert torch.equal(one["torch"], other["torch"])
        assert one["words"] == other["words"]


def test_weights_outlive_their_masters(handmade: Path, tmp_path: Path) -> None:
    found = made(handmade, tmp_path / "a", drop("*:master"))
    assert_holds(found, {key: value for key, value in HANDMADE.items() if key[1] != "master"})
    assert found.index.tensors[found.ids["layer.weight", "weight"]].derived_from is None


def test_a_parameter_that_is_dropped_is_in_no_group(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    checkpoint, values = llama
    found = made(checkpoint, tmp_path / "a", drop("model.layers.{i}.mlp.*", f"{NORM}:exp_avg"))
    expected = {key: v for key, v in values.items() if ".mlp." not in key[0] and key != (NORM, "exp_avg")}
    assert_holds(found, expected)
    record = found.manifest.optimizer
    assert record is not None
    assert {name for group in record.groups for name in group.parameters} == {name for name, _ in expected}
    assert {name for group in record.scalars for name in group.parameters} == {name for name, _ in expected} - {NORM}


def test_patterns_in_a_row_keep_what_any_of_them_selects(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    checkpoint, values = llama
    directory = str(checkpoint.storage)
    assert main(["edit", directory, str(tmp_path / "a"), "--keep", "*.{i}.*:weight", "--keep", f"{NORM}:exp_avg"]) == 0
    kept = {key: v for key, v in values.items() if (".layers." in key[0] and key[1] == "weight") or key == (NORM, "exp_avg")}
    assert_holds(Checkpoint.open(tmp_path / "a"), kept)


def test_without_the_optimizer(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    checkpoint, values = llama
    table = table_of(checkpoint)
    lone = {key: entry for key, entry in table.entries.items() if key != (NORM, "weight")}
    table = dataclasses.replace(table, entries=lone)
    found = NoOptimizer().apply(table)
    convert(source_of(found, ()), tmp_path / "a")
    expected = {key: value for key, value in values.items() if key[1] == "weight"}
    assert_holds(Checkpoint.open(tmp_path / "a"), {**expected, (NORM, "weight"): values[NORM, "master"]})
    assert found.optimizer is None
    assert found.left_out == ("the optimizer: 20 states, 20 masters, its hyperparameters and steps",)


@pytest.mark.parametrize(("gone", "left"), [(HEAD, EMBEDDING), (EMBEDDING, HEAD)])
def test_a_tied_tensor_stays_under_the_name_that_is_left(
    llama: tuple[Checkpoint, Values], tmp_path: Path, gone: str, left: str
) -> None:
    checkpoint, values = llama
    found = made(checkpoint, tmp_path / "a", drop(gone))
    assert found.manifest.aliases == {}
    assert_holds(found, {(left if name == EMBEDDING else name, state): v for (name, state), v in values.items()})
    assert found.manifest.optimizer is not None
    members = [name for group in found.manifest.optimizer.groups for name in group.parameters]
    assert (left in members, gone in members) == (True, False)


# ---------------------------------------------------------------- casting


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn"])
def test_a_cast_is_that_of_torch_and_leaves_other_states_alone(
    llama: tuple[Checkpoint, Values], tmp_path: Path, dtype: str
) -> None:
    checkpoint, values = llama
    for state in ("master", "exp_avg", "weight"):
        found = made(checkpoint, tmp_path / state, Cast.parse(f"*:{state}={dtype}"))
        cast = {key: v.to(getattr(torch, dtype)) if key[1] == state else v for key, v in values.items()}
        assert_holds(found, cast)
        assert all(info.derived_from for info in found.index.tensors if info.state == "weight")


def test_what_is_no_number_with_a_point_is_not_cast(handmade: Path, tmp_path: Path) -> None:
    found = made(handmade, tmp_path / "a", Cast.parse("*:weight=float32"))
    floats = {key: v.float() if v.is_floating_point() and key[1] == "weight" else v for key, v in HANDMADE.items()}
    assert_holds(found, floats)
    with pytest.raises(MismatchError, match="selects no floating point tensor"):
        made(handmade, tmp_path / "b", Cast.parse("norm.*=float32"))


# ---------------------------------------------------------------- names


def test_layers_are_pruned_and_renumbered(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    checkpoint, values = llama
    steps = drop("model.layers.0.*"), rename("model.layers.{i + 1}.*=model.layers.{i}.*", f"{HEAD}=head")
    found = made(checkpoint, tmp_path / "a", *steps)
    moved = {(name.replace(".1.", ".0."), state): v for (name, state), v in values.items() if ".layers.0." not in name}
    assert_holds(found, moved)
    assert found.manifest.aliases == {"head": EMBEDDING}
    assert found.manifest.optimizer is not None
    assert {name for group in found.manifest.optimizer.groups for name in group.parameters} == {name for name, _ in moved}


def test_two_names_change_places(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    checkpoint, values = llama
    arguments = ["--rename", "model.layers.0.*=model.layers.1.*", "--rename", "model.layers.1.*=model.layers.0.*"]
    assert main(["edit", str(checkpoint.storage), str(tmp_path / "a"), *arguments]) == 0
    other = {"0": "1", "1": "0"}
    swapped = {(".".join(other.get(part, part) for part in name.split(".")), state): v for (name, state), v in values.items()}
    assert_holds(Checkpoint.open(tmp_path / "a"), swapped)


# ---------------------------------------------------------------- rules


def test_rules_are_a_step_among_others(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    """There and back: bit for bit what it was, overrides, groups and tied names too."""
    checkpoint, values = llama
    found = made(checkpoint, tmp_path / "a", Cast.parse("*:exp_avg=bfloat16"), Translate(LLAMA))
    assert found.manifest.writer.dialect == "megatron-core"
    assert found.manifest.aliases == {"output_layer.weight": "embedding.word_embeddings.weight"}
    back = made(found, tmp_path / "b", Translate(LLAMA))
    assert back.manifest.aliases == TIED
    assert_holds(back, {key: v.to(BF16) if key[1] == "exp_avg" else v for key, v in values.items()})
    record, before = back.manifest.optimizer, checkpoint.manifest.optimizer
    assert record is not None
    assert before is not None
    assert [set(group.parameters) for group in record.groups] == [set(group.parameters) for group in before.groups]
    view = translated(checkpoint, LLAMA.rules, {info.name: info.shape for info in found.index.tensors if info.kind != "object"},
                      LLAMA.sizes_of(FACTS))  # fmt: skip
    assert all(
        torch.equal(found.read_tensor(*info.key), view.read_tensor(*info.key).to(found.read_tensor(*info.key).dtype))
        for info in view.index.tensors
    )


WITHIN = """
[dialect]
name = "huggingface"
other = "huggingface"
[[rules]]
here = "model.layers.{i}.mlp.gate_up.weight [(ffn | ffn) h]"
there = ["model.layers.{i}.mlp.gate_proj.weight [ffn h]", "model.layers.{i}.mlp.up_proj.weight [ffn h]"]
[[rules]]
here = "model.layers.{i}.mlp.down.weight [f h]"
there = "model.layers.{i}.mlp.down_proj.weight [h f]"
"""


def test_rules_within_a_dialect_leave_the_rest_as_it_is(llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    checkpoint, values = llama
    found = made(checkpoint, tmp_path / "a", Translate(parse(WITHIN)))
    expected = {key: value for key, value in values.items() if ".mlp." not in key[0]}
    for state in ("weight", "master", "exp_avg"):
        for layer in range(2):
            of = f"model.layers.{layer}.mlp"
            both = [values[f"{of}.{part}_proj.weight", state] for part in ("gate", "up")]
            expected[f"{of}.gate_up.weight", state] = torch.cat(both)
            expected[f"{of}.down.weight", state] = values[f"{of}.down_proj.weight", state].T.contiguous()
    assert_holds(found, expected)
    assert found.manifest.optimizer is not None
    assert {n for group in found.manifest.optimizer.groups for n in group.parameters} == {name for name, _ in expected}
    assert found.manifest.aliases == TIED


# ---------------------------------------------------------------- the vocabulary


def resized(values: Values, rows: int, fill: str, names: tuple[str, ...] = (EMBEDDING,)) -> Values:
    """As torch does it: float64 means, of masters; weights of new rows are casts of theirs."""
    found = dict(values)
    for name in names:
        masters = values[name, "master"]
        mean = (masters.double().sum(0) / len(masters)).float() if fill == "mean" else torch.zeros(masters.shape[1])
        more = rows - len(masters)
        for state, row in (("master", mean), ("weight", mean.to(BF16)), ("exp_avg", torch.zeros_like(mean))):
            old = values[name, state]
            found[name, state] = torch.cat([old, row.expand(more, -1)]) if more > 0 else old[:rows]
    return found


@pytest.mark.parametrize(("rows", "fill"), [(11, "mean"), (11, "zeros"), (5, "mean"), (7, "mean")])
def test_a_vocabulary_of_other_rows(llama: tuple[Checkpoint, Values], tmp_path: Path, rows: int, fill: Any) -> None:
    checkpoint, values = llama
    found = made(checkpoint, tmp_path / "a", Resize(rows, fill=fill))
    assert_holds(found, resized(values, rows, fill))
    assert found.manifest.aliases == TIED
    alone = made(checkpoint, tmp_path / "b", Resize(rows, fill=fill), drop("*:master"))  # weights tell themselves then
    assert_holds(alone, {key: v for key, v in resized(values, rows, fill).items() if key[1] != "master"})


def test_rows_up_to_a_multiple_and_what_the_manifest_tells_of_them(tmp_path: Path) -> None:
    values = values_of({**HF, HEAD: HF[EMBEDDING]})
    model = {"family": "llama", "facts": {**FACTS, "vocab": 7}}
    checkpoint = saved(tmp_path / "untied", values, aliases={}, model=model)
    found = made(checkpoint, tmp_path / "a", Resize(multiple=8))
    assert_holds(found, resized(values, 8, "mean", (EMBEDDING, HEAD)))
    assert found.manifest.writer.model["facts"]["vocab"] == 8
    less = made(found, tmp_path / "b", Resize(7))
    assert_holds(less, values)


def test_a_vocabulary_of_megatrons_and_the_entries_of_its_tokenizer(tmp_path: Path) -> None:
    names = {EMBEDDING: "embedding.word_embeddings.weight", HEAD: "output_layer.weight"}
    values = {(names[name], state): v for (name, state), v in values_of({**HF, HEAD: HF[EMBEDDING]}).items() if name in names}
    model = {"family": "", "facts": {"tokens": 6}}
    checkpoint = saved(tmp_path / "megatron", values, aliases={}, dialect="megatron-core", model=model)
    fewer = made(checkpoint, tmp_path / "a", Resize(5))
    assert_holds(fewer, resized(values, 5, "mean", tuple(names.values())))
    assert fewer.manifest.writer.model["facts"] == {"tokens": 5}
    padded = made(checkpoint, tmp_path / "b", Resize(multiple=8))
    assert padded.manifest.writer.model["facts"] == {"tokens": 6}, "padding adds no entries"


def test_an_overridden_row_stays_and_a_lone_weight_has_a_mean_of_its_own(handmade: Path, tmp_path: Path) -> None:
    tensors = Selection.parse("layer.weight")
    found = made(handmade, tmp_path / "a", Resize(6, selection=tensors), Resize(9, selection=Selection.parse("head.weight")))
    mean = (master().double().sum(0) / 4).float().expand(2, -1)
    wide = (embed().double().sum(0) / 8).half().expand(1, -1)
    expected: Values = {
        MASTER.key: torch.cat([master(), mean]), MOMENT.key: torch.cat([moment(), torch.zeros(2, 6)]),
        ("layer.weight", "weight"): torch.cat([weight(), mean.to(BF16)]), EMBED.key: torch.cat([embed(), wide]),
    }  # fmt: skip
    assert_holds(found, {**HANDMADE, **expected})
    short = made(handmade, tmp_path / "b", Resize(3, selection=tensors, dim=1))
    narrow = {key: v[:, :3] if key[0] == "layer.weight" else v for key, v in HANDMADE.items()}
    assert_holds(short, narrow)


def test_a_model_of_which_nothing_is_known_is_not_guessed_at(handmade: Path, tmp_path: Path) -> None:
    with pytest.raises(LanguageError, match="name them with --vocabulary-tensors"):
        made(handmade, tmp_path / "a", Resize(9))
    with pytest.raises(MismatchError, match="different numbers of rows"):
        made(handmade, tmp_path / "a", Resize(9, selection=Selection.parse("{*any}.weight")))


# ---------------------------------------------------------------- averages


def several(folder: Path, count: int = 3) -> list[tuple[Checkpoint, Values]]:
    """Of one model, with other numbers each."""
    found = []
    for at in range(count):
        values = {key: v.clone() for key, v in values_of(HF).items()}
        for (name, state), value in values.items():
            if state != "weight":
                value.mul_(1 + at / 3).add_(at / 7)
                if state == "master":
                    values[name, "weight"] = value.to(BF16)
        values[Q, "weight"][at, 1:4] = 99.0
        found.append((saved(folder / f"step{at}", values, aliases=TIED), values))
    return found


def mean_of(every: list[torch.Tensor], decay: float | None) -> torch.Tensor:
    """In float64, one after the other."""
    arrays = [each.double().numpy() for each in every]
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array if decay is None else total * decay + array * (1 - decay)
    return torch.from_numpy(total / len(every) if decay is None else total).to(every[0].dtype)


@pytest.mark.parametrize("decay", [None, 0.9])
def test_masters_are_averaged_and_weights_are_their_casts(tmp_path: Path, decay: float | None) -> None:
    sources = several(tmp_path)
    table = Average(decay).of([table_of(each) for each, _ in sources])
    convert(source_of(table, (Average(decay),)), tmp_path / "mean")
    expected: Values = {}
    for name in HF:
        expected[name, "master"] = mean_of([values[name, "master"] for _, values in sources], decay)
        expected[name, "weight"] = expected[name, "master"].to(BF16)
    own = mean_of([values[Q, "weight"] for _, values in sources], decay)
    expected[Q, "weight"][:3, 1:4] = own[:3, 1:4]  # where one of them held something else than the cast
    found = Checkpoint.open(tmp_path / "mean")
    assert_holds(found, expected)
    assert (found.manifest.optimizer, found.manifest.aliases) == (None, TIED)
    assert table.left_out == ("the optimizer: 20 states, its hyperparameters and steps; moments cannot be averaged",)


def test_buffers_are_the_last_ones(handmade: Path, tmp_path: Path) -> None:
    other = made(handmade, tmp_path / "b", Cast.parse("embed.*=float32"))
    last, count = table_of(other), torch.tensor(7)
    entries = {**last.entries, COUNT.key: dataclasses.replace(last.entries[COUNT.key], read=lambda _: count.reshape(1))}
    table = Average().of([table_of(Checkpoint.open(handmade)), dataclasses.replace(last, entries=entries)])
    convert(source_of(table, ()), tmp_path / "mean")
    expected = {key: v.float() if key == EMBED.key else v for key, v in HANDMADE.items() if key[1] != "exp_avg"}
    assert_holds(Checkpoint.open(tmp_path / "mean"), {**expected, COUNT.key: count})


def test_the_last_ones_of_a_save_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sources = several(tmp_path / "saves")
    assert main(["average", str(tmp_path / "mean"), str(tmp_path / "saves"), "--last", "2"]) == 0
    found = Checkpoint.open(tmp_path / "mean").read_tensor(NORM, "master")
    assert torch.equal(found, mean_of([values[NORM, "master"] for _, values in sources[1:]], None))
    out = capsys.readouterr().out
    assert "mean of 2 checkpoints" in out
    assert "left out: the optimizer" in out
    assert main(["average", str(tmp_path / "more"), str(tmp_path / "saves"), "--last", "4"]) == 2
    assert "4 complete checkpoints are needed, 3 are there (step0, step1, step2)" in capsys.readouterr().err


def test_checkpoints_of_two_models_have_no_mean(handmade: Path, llama: tuple[Checkpoint, Values], tmp_path: Path) -> None:
    one, two = table_of(Checkpoint.open(handmade)), table_of(llama[0])
    with pytest.raises(MismatchError, match=r"have different models: only one of them has embed\.weight"):
        Average().of([one, two])
    wider = Resize(9, selection=Selection.parse("embed.weight")).apply(one)
    with pytest.raises(MismatchError, match=r"embed.weight has shape \[8, 3\] in the first, \[9, 3\] in the second"):
        Average().of([one, dataclasses.replace(wider, identity=("other",))])
    with pytest.raises(MismatchError, match="is listed twice"):
        Average().of([one, one])


# ---------------------------------------------------------------- as a whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drop", "layers.*"], "'layers.*' matches no tensor; the names are embed.weight"),
        (["--keep", "*:exp_avg_sq"], "matches no tensor; the states are exp_avg, master, weight"),
        (["--cast", "*:exp_avg=int8"], "expected PATTERN=DTYPE, where DTYPE is one of float64, float32"),
        (["--cast", "nobody=float32"], "'nobody' matches no tensor"),
        (["--rename", "layer.weight=embed.weight"], "several tensors would have the same name: embed.weight (from"),
        (["--rename", "layer.weight=head.weight"], "several tensors would have the same name: head.weight (from"),
        (["--rename", "{*a}.weight={*b}.weight"], "must be in both names"),
        (["--rename", "model.{i}.*=model.{i}.*"], "matches no tensor"),
        (["--rename", "nothing"], "expected OLD=NEW"),
        (["--drop", "*"], "no tensor is left"),
        (["--rules", "/nowhere.toml"], "cannot be read as a dialect"),
        (["--vocabulary", "many"], "expected a whole number"),
        (["--vocabulary", "0", "--vocabulary-tensors", "embed.*"], "expected a whole number above 0"),
        (["--no-optimizer", "--vocabulary-tensors", "embed.*"], "--vocabulary-tensors needs --vocabulary"),
        (["--merge-lora"], "--lora-config PATH"),
        (["--merge-lora", "--lora-alpha", "8"], "has no adapters"),
        ([], "no step is given"),
    ],
)  # fmt: skip
def test_wrong_input_is_told_before_anything_is_written(
    handmade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["edit", str(handmade), str(tmp_path / "a"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_plan_alone_writes_nothing(handmade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["edit", str(handmade), str(tmp_path / "a"), "--rename", "layer.*=block.*", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "of layer.weight" in out
    assert "nothing was written" in out
    assert not (tmp_path / "a").exists()
    assert main(["edit", str(handmade), str(handmade), "--no-optimizer"]) == 2
    assert "holds a checkpoint already" in capsys.readouterr().err


def test_a_damaged_source_is_not_operated_on(handmade: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damaged = save_ranks(tmp_path / "damaged", 1)
    data = damaged / "data" / "rank00000.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    assert main(["edit", str(damaged), str(tmp_path / "a"), "--no-optimizer"]) == 1
    assert "rank00000.safetensors" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def test_one_that_was_cut_off_goes_on_but_not_with_other_steps(
    llama: tuple[Checkpoint, Values], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, values = llama
    write = pipeline.write_rows

    def until_the_last(storage: Any, name: str, *more: Any) -> None:
        if "rank00003" in name:
            raise OSError("the disk is gone")
        write(storage, name, *more)

    def sources(*steps: Step) -> pipeline.Source:
        return source_of(after(table_of(checkpoint), steps), steps, portion_bytes=3000)

    monkeypatch.setattr(pipeline, "write_rows", until_the_last)
    first, second = Cast.parse("*:exp_avg=bfloat16"), Resize(9)
    with pytest.raises((OSError, UnickptError)):
        convert(sources(first, Resize(9, fill="zeros")), tmp_path / "a", workers=1)
    assert not is_checkpoint(tmp_path / "a")
    assert (tmp_path / "a" / ROWS_FOLDER).exists()
    with pytest.raises((OSError, UnickptError)):
        convert(sources(first, second), tmp_path / "a", workers=1)
    monkeypatch.setattr(pipeline, "write_rows", write)
    done = convert(sources(first, second), tmp_path / "a")
    assert done.files > done.kept == 2, "two of the same steps; none of those with zeros"
    expected = {key: v.to(BF16) if key[1] == "exp_avg" else v for key, v in resized(values, 9, "mean").items()}
    assert_holds(Checkpoint.open(tmp_path / "a"), expected)


def test_a_surgery_tells_of_the_one_before(handmade: Path, tmp_path: Path) -> None:
    once = made(handmade, tmp_path / "a", drop("empty.*"))
    twice = made(once, tmp_path / "b", NoOptimizer())
    notes = twice.objects().value["edits"]
    assert [note["source"] for note in notes] == [str(handmade), str(tmp_path / "a")]
    assert list(differences(once, once)) != []


def table_with(checkpoint: Checkpoint, **more: Any) -> Table:
    return dataclasses.replace(table_of(checkpoint), **more)


def test_what_an_excluded_parameter_would_be_is_not_guessed_at(llama: tuple[Checkpoint, Values]) -> None:
    with pytest.raises(MismatchError, match="was saved without frozen"):
        Translate(LLAMA).apply(table_with(llama[0], excluded=("frozen",)))
    with pytest.raises(MismatchError, match="has no counterpart for strange"):
        Translate(LLAMA).apply(Rename((Renaming.parse(f"{NORM}=strange"),)).apply(table_of(llama[0])))


# ---------------------------------------------------------------- adapters, by hand (those of peft: tests/integration/hf)


def test_scalings_are_those_of_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    body: dict[str, Any] = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {"q_proj": 2},
                            "rank_pattern": {r"layers\.1\.k_proj": 16}}  # fmt: skip
    path.write_text(json.dumps(body))
    config = LoraConfig.read(path)
    assert config.scaling("model.layers.0.v_proj", 4, "") == 2.0
    assert config.scaling("model.layers.0.q_proj", 4, "") == 0.5
    assert config.scaling("model.layers.1.k_proj", 16, "") == 0.5
    with pytest.raises(MismatchError, match="have rank 8, the configuration has 4"):
        config.scaling("model.layers.0.v_proj", 8, "")
    for wrong, message in (
        ({"use_dora": True}, "use_dora is set"),
        ({"peft_type": "LOHA"}, "only LoRA"),
        ({"r": "x"}, "not a number"),
    ):
        path.write_text(json.dumps({**body, **wrong}))
        with pytest.raises(UnickptError, match=message):
            LoraConfig.read(path)


def test_half_an_adapter_is_not_merged(llama: tuple[Checkpoint, Values]) -> None:
    table = table_of(llama[0])
    entry = table.entries[Q, "weight"]
    config = MergeLora(LoraConfig(8))
    for name, message in (
        ("model.q.lora_A.default.weight", "has lora_A, expected"),
        ("model.q.lora_magnitude_vector.default.weight", "unknown part of an"),
    ):  # fmt: skip
        part = dataclasses.replace(entry, info=dataclasses.replace(entry.info, name=name, derived_from=None))
        with pytest.raises(MismatchError, match=message):
            config.apply(table.with_entries([*table.tensors(), part]))


def test_rows_of_a_product_are_never_few(tmp_path: Path) -> None:
    for rows in (1, 63, 64, 65, 127, 129, 200):
        for lo in range(rows):
            for hi in range(lo + 1, rows + 1):
                first, last = _grid(lo, hi, rows)
                assert 0 <= first <= lo < hi <= last <= rows
                assert last - first >= min(rows, 64)
