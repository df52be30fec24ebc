"""Checkpoints of Megatron-DeepSpeed: converted, exported, and loaded by a transformers job.

``MEGATRON_DEEPSPEED=/path/to/Megatron-DeepSpeed`` names a tree, which is taken as it is. Trees before and after FPDT differ in
the rows of query_key_value.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support.forked_jobs import fork_ranks
from tests.support.rounding import limit_of
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.cli.main import main

TREE = os.environ.get("MEGATRON_DEEPSPEED", "")
LAYERS, HEADS, HEAD, HIDDEN, VOCABULARY = 3, 4, 8, 32, 91
FUSED = "query_key_value"
RENAMED = (
    ("ln_1", "input_layernorm"), ("ln_2", "post_attention_layernorm"), ("attn.c_attn", f"self_attention.{FUSED}"),
    ("attn.c_proj", "self_attention.dense"), ("mlp.c_fc", "mlp.dense_h_to_4h"), ("mlp.c_proj", "mlp.dense_4h_to_h"),
)  # fmt: skip
needs_tree = pytest.mark.skipif(not TREE, reason="MEGATRON_DEEPSPEED names no Megatron-DeepSpeed tree")


@pytest.fixture(scope="module")
def thirds() -> bool:
    """Whether a rank's rows of query_key_value are all queries, all keys, all values, by the source of the tree."""
    return "each_hidden_size" in (Path(TREE) / "megatron/model/transformer.py").read_text()


def train(folder: Path, mode: str, precision: str) -> Checkpoint:
    if mode == "pipe" and not (Path(TREE) / "megatron/model/layernorm.py").is_file():
        pytest.skip("no pipeline of this tree runs on a CPU: torch's LayerNorm, which it takes there, has no sequence_parallel")
    fork_ranks(4, "tests.jobs.deepspeed.megatron_deepspeed_worker", "train", str(folder), mode, precision)
    assert main(["convert", str(folder / "job"), str(folder / "converted")]) == 0
    assert main(["verify", str(folder / "converted")]) == 0
    return Checkpoint.open(folder / "converted")


def configure(folder: Path) -> None:
    from transformers import GPT2Config

    GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, activation_function="gelu",
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0,
    ).save_pretrained(folder / "config")  # fmt: skip


def assert_every_rank_agrees(found: Checkpoint, folder: Path, thirds: bool, job: str = "job", tensor: int = 2) -> None:
    seen: set[tuple[str, str]] = set()
    for rank in range(len(list(folder.glob(f"{job}.rank*")))):
        for (name, state), (at, values, local, dim) in torch.load(folder / f"{job}.rank{rank}", weights_only=False).items():
            if rank >= tensor and name.startswith("tied_modules.embed.position_embeddings"):
                continue  # the last stage has a copy that it never uses, and that nothing keeps equal: words alone are tied
            whole = found.read_tensor(name, state)
            if "word_embeddings" in name:  # of which the padding may be left out
                whole = torch.nn.functional.pad(whole[:VOCABULARY], (0, 0, 0, local[0] * tensor - VOCABULARY))
            mine = share(whole, local, dim, rank % tensor, tensor, 3 if thirds and FUSED in name else 1).reshape(-1)
            mine = mine[at : at + len(values)].clone()
            if "word_embeddings" in name:
                kept = torch.arange(at, at + len(values)) < (VOCABULARY - rank % tensor * local[0]) * HIDDEN
                mine, values = mine[kept], values[kept]
            assert torch.equal(mine, values), (rank, name, state)
            seen.add((name, state))
    stored = {info.key for info in found.index.tensors if info.kind != "object" and "@" not in info.name}
    assert {key for key in stored if key[1] != "master"} == {key for key in seen if key[1] != "master"}


def share(whole: torch.Tensor, local: tuple[int, ...], dim: int, rank: int, ranks: int, parts: int) -> torch.Tensor:
    """Return one rank's part of a tensor, as Megatron's layers divide it."""
    if dim < 0 or ranks == 1:
        return whole
    pieces = whole.chunk(parts, 0)
    return torch.cat([piece.narrow(dim, rank * local[dim] // parts, local[dim] // parts) for piece in pieces])


@needs_tree
@pytest.mark.parametrize("mode", ["pipe", "plain"])
def test_the_exported_model_has_the_logits_of_the_job(tmp_path: Path, mode: str, thirds: bool) -> None:
    from transformers import AutoModelForCausalLM

    from tests.jobs.deepspeed.megatron_deepspeed_worker import rows

    found = train(tmp_path, mode, "fp32")
    writer = found.manifest.writer
    assert writer.dialect == {"pipe": "megatron-deepspeed-pipe", "plain": "megatron-deepspeed"}[mode]
    facts = {"layers": LAYERS, "heads": HEADS, "groups": HEADS, "head_dim": HEAD, "vocab": VOCABULARY}
    assert writer.model == {"family": "gpt2", "facts": facts | {"qkv_blocks": 1 if thirds else HEADS}}
    assert_every_rank_agrees(found, tmp_path, thirds)
    configure(tmp_path)
    assert main(["export", str(tmp_path / "converted"), str(tmp_path / "hf"), "--config", str(tmp_path / "config")]) == 0
    model, message = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(message.values()), message
    with torch.no_grad():
        got, exact = model(rows(1)[:, :-1]).logits, model.double()(rows(1)[:, :-1]).logits
    want = torch.cat([torch.load(tmp_path / f"job.logits{rank}") for rank in range(2)], -1)[..., :VOCABULARY]
    assert want.shape == got.shape
    assert want.std() > 0.05
    limit = limit_of(float((got - exact).abs().max()), float(exact.abs().max()))  # float64 shows by how much float32 is off
    assert float((got - want).abs().max()) <= limit


@needs_tree
def test_a_transformers_job_continues_with_masters_and_moments(tmp_path: Path, thirds: bool) -> None:
    found = train(tmp_path, "pipe", "bf16")
    assert_every_rank_agrees(found, tmp_path, thirds)
    configure(tmp_path)
    assert_transformers_continue(found, tmp_path, "converted", thirds)


def assert_transformers_continue(found: Checkpoint, tmp_path: Path, tag: str, thirds: bool) -> None:
    fork_ranks(2, "tests.jobs.deepspeed.megatron_deepspeed_worker", "load", str(tmp_path), tag)
    truth = torch.load(tmp_path / "loaded.truth", weights_only=False)
    assert len({key for key in truth if "/" in key}) == 4 * (4 + 12 * LAYERS)
    for key, got in truth.items():
        state, _, name = key.partition("/")
        if name:
            assert torch.equal(got, as_gpt2(found, name, state, thirds)), key
    assert truth["step"] == [2.0]


@needs_tree
@pytest.mark.parametrize(("mode", "precision"), [("pipe", "bf16"), ("plain", "fp32")])
def test_a_job_with_the_key_resumes_under_other_degrees(
    tmp_path: Path, mode: str, precision: str, thirds: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "tests.jobs.deepspeed.megatron_deepspeed_worker"
    fork_ranks(4, job, "train", str(tmp_path), mode, precision, "unickpt")
    found = Checkpoint.open(tmp_path / "job" / "global_step2")
    writer = found.manifest.writer
    assert writer.dialect == {"pipe": "megatron-deepspeed-pipe", "plain": "megatron-deepspeed"}[mode]
    assert writer.model["facts"]["vocab"] == VOCABULARY
    assert_every_rank_agrees(found, tmp_path, thirds)
    for ranks, tensor, stages in ((2, 1, 2), (4, 4, 1), (1, 1, 1)) if mode == "pipe" else ((4, 4, 0), (2, 1, 0)):
        fork_ranks(ranks, job, "resume", str(tmp_path), str(tensor), str(stages), precision)
        assert_every_rank_agrees(found, tmp_path, thirds, f"resumed-{tensor}-{stages}", tensor)
    configure(tmp_path)
    assert main(["export", str(tmp_path / "job"), str(tmp_path / "hf"), "--config", str(tmp_path / "config")]) == 0
    copies = [info.name for info in found.index.tensors if "embed@" in info.name and info.state == "weight"]
    assert bool(copies) == (mode == "pipe")
    assert not copies or f"left out, because no model reads them: {', '.join(sorted(copies))}" in capsys.readouterr().out
    if precision == "bf16":
        (tmp_path / "converted").symlink_to(tmp_path / "job" / "global_step2")
        assert_transformers_continue(found, tmp_path, "converted", thirds)


def as_gpt2(found: Checkpoint, name: str, state: str, thirds: bool) -> torch.Tensor:
    """Return a tensor of GPT-2, computed by hand."""
    if not name.startswith("transformer.h."):
        own = {"transformer.wte.weight": "tied_modules.embed.word_embeddings.weight",
               "transformer.wpe.weight": "tied_modules.embed.position_embeddings.weight"}  # fmt: skip
        value = found.read_tensor(own.get(name, f"{LAYERS + 2}.{name.rpartition('.')[2]}"), state)
        return value[:VOCABULARY] if "wte" in name else value  # without padding
    _, _, layer, inner = name.split(".", 3)
    for theirs, ours in RENAMED:
        inner = inner.replace(theirs, ours)
    value = found.read_tensor(f"{int(layer) + 2}.{inner}", state)
    if FUSED in inner and not thirds:
        value = value.view(HEADS, 3, HEAD, -1).transpose(0, 1).reshape(value.shape)
    return value.T if value.dim() == 2 else value
