"""Try Megatron's scripts other than ``pretrain_gpt.py`` and write what each shows: ``docs/evidence/megatron-scripts.md``.

    MEGATRON_LM=/path/to/Megatron-LM python -m evidence.megatron.other_scripts [--folder DIR] [--only NAME ...]
        [--out FILE]

For each row a job saves after three iterations and continues to the fifth. A job of another layout loads, saves without a
training step, and then trains the same two iterations. The two checkpoints are compared bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

import torch

from tests.support.repository import REPO
from unickpt.transform.convert.megatron.keys import VOCABULARY_TENSORS
from unickpt.checkpoint.load.checkpoint import Checkpoint
from unickpt.testing.launch import torchrun

LOSS = re.compile(r"iteration +(\d+)/.*?lm loss: ([0-9.E+-]+)")
BF16 = "--bf16 --use-distributed-optimizer"
NO_STEP = "--train-iters 3 --override-opt_param-scheduler"  # Megatron's scheduler checks the number of iterations
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


@dataclass(frozen=True)
class Row:
    """A script and two layouts, each of which is a world size and arguments."""

    script: str
    source: tuple[int, str]
    target: tuple[int, str]

    @property
    def name(self) -> str:
        return f"{self.script}: {layout(self.source)} to {layout(self.target)}"


ROWS = (
    Row("pretrain_mamba.py", (2, f"{BF16} {TP2}"), (2, f"{BF16} {PP2}")),
    Row("pretrain_mamba.py", (2, BF16), (2, f"--bf16 {TP2}")),
    Row("pretrain_bert.py", (2, f"{BF16} {TP2}"), (2, f"{BF16} {PP2}")),
    Row("pretrain_bert.py", (2, BF16), (1, "--bf16")),
    Row("pretrain_t5.py", (2, f"{BF16} {TP2}"), (2, BF16)),
    Row("pretrain_t5.py", (1, "--bf16"), (2, f"{BF16} {TP2}")),
    Row("pretrain_vlm.py", (2, f"{BF16} {TP2}"), (2, BF16)),
    Row("pretrain_vlm.py", (2, BF16), (2, f"{BF16} {PP2}")),
)
DATA = ("pretrain_bert.py", "pretrain_t5.py")


def layout(side: tuple[int, str]) -> str:
    """Return a layout as words, such as ``TP2 dist``."""
    world, arguments = side
    shape = "TP2" if TP2 in arguments else "PP2" if PP2 in arguments else f"DP{world}"
    return f"{shape} {'distributed optimizer' if 'distributed' in arguments else 'plain'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where to work and keep rows (default: a temporary folder)")
    parser.add_argument("--only", nargs="+", default=[], help="scripts to run; the rows of others stay as they were")
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "evidence" / "megatron-scripts.md")
    args = parser.parse_args()
    tree = Path(os.environ["MEGATRON_LM"]).resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (args.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / "rows.json"
        results: dict[str, str] = json.loads(kept.read_text()) if kept.is_file() else {}
        for at, row in enumerate(ROWS):
            if not args.only or row.script in args.only:
                results[row.name] = examine(tree, row, folder / str(at))
                print(row.name, results[row.name], flush=True)
                kept.write_text(json.dumps(results, indent=1))
                args.out.write_text(page(results, tree.name))


def examine(tree: Path, row: Row, place: Path) -> str:
    """Return the result of a row, or the end of the error that stopped it."""
    subprocess.run(["rm", "-rf", str(place)], check=True)
    place.mkdir()
    data = words(place) if row.script in DATA else ""
    base = f"{data} --train-iters 9 --ckpt-format unickpt"
    outputs = []
    for (world, shape), legs in (
        (row.source, f"--save {place / 'a'} --save-interval 3 --exit-interval 5"),
        (row.target, f"--load {place / 'a'} --ckpt-step 3 --save {place / 'b'} --save-interval 100 {NO_STEP}"),
        (row.target, f"--load {place / 'a'} --ckpt-step 3 --exit-interval 5"),
    ):
        done = torchrun(
            world, "tests.jobs.megatron.pretrain", *f"{base} {shape} {legs}".split(),
            env={"MEGATRON_LM": str(tree), "GLOO_SOCKET_IFNAME": "lo", "SCRIPT": row.script}, timeout_s=300, check=False,
        )  # fmt: skip
        (place / f"{len(outputs)}.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            return f"does not run: `{last_error(done.stdout + done.stderr)}`"
        outputs.append({int(at): float(value) for at, value in LOSS.findall(done.stdout)})
    count, unequal = compared(place / "a/iter_0000003", place / "b/iter_0000003")
    if unequal:
        return f"{len(unequal)} of {count} tensors differ: {', '.join(unequal[:3])}"
    apart = abs(outputs[0][4] - outputs[2][4])
    return (
        f"{count} tensors equal bit for bit; loss of the next iteration {outputs[2][4]:.6f}, {apart:.1e} from the first job's"
    )


def last_error(text: str) -> str:
    lines = [line for line in text.splitlines() if re.search(r"\w*Error\b.*:", line) and "ChildFailedError" not in line]
    return (lines[-1] if lines else text[-200:]).split("]:")[-1].strip()[:200]


def compared(first: Path, second: Path) -> tuple[int, list[str]]:
    """Return the number of tensors of two checkpoints, and those that are not equal in every bit.

    With another padding of the vocabulary, the rows that both have are compared.
    """
    a, b = Checkpoint.open(first), Checkpoint.open(second)
    keys = {info.key for c in (a, b) for info in c.index.tensors if info.kind != "object"}
    unequal = []
    for key in sorted(keys):
        if a.info(*key) is None or b.info(*key) is None:
            unequal.append(" ".join(key))
            continue
        one, other = a.read_tensor(*key), b.read_tensor(*key)
        if key[0].endswith(VOCABULARY_TENSORS):
            rows = min(len(one), len(other))
            one, other = one[:rows], other[:rows]
        if not torch.equal(one, other):
            unequal.append(" ".join(key))
    return len(keys), unequal


def words(place: Path) -> str:
    """Write a vocabulary of word pieces and a data set of documents. Returns the arguments that name them."""
    from megatron_unickpt.testing import cpu  # noqa: F401  # before anything of megatron
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (place / "vocab.txt").write_text("\n".join([*special, *(f"w{at}" for at in range(500))]) + "\n")
    import numpy

    builder = IndexedDatasetBuilder(str(place / "text.bin"), dtype=numpy.int32)
    numbers = random.Random(7)
    for _ in range(200):
        lengths = [numbers.randint(8, 14) for _ in range(6)]
        tokens = torch.tensor([numbers.randint(len(special), 500) for _ in range(sum(lengths))])
        builder.add_document(tokens, lengths)
    builder.finalize(str(place / "text.idx"))
    return f"--data-path {place / 'text'} --vocab-file {place / 'vocab.txt'} --data-cache-path {place / 'cache'}"


def page(results: dict[str, str], tree: str) -> str:
    """The document."""
    lines = [
        "# Megatron's other scripts", "", "Do Megatron's scripts other than `pretrain_gpt.py` resume under another layout?", "",
        "`MEGATRON_LM=/path/to/Megatron-LM python -m evidence.megatron.other_scripts`", "",
        f"Scripts of {tree}, unchanged; torch {installed_version('torch')}, Python {platform.python_version()}, CPU and gloo. "
        "A job of the first layout saves after three iterations. A job of the second layout loads this checkpoint and saves "
        "again before a training step. Weights, masters and moments of the two checkpoints are compared. T5 under another "
        "tensor parallel size has another padding of the vocabulary: the rows that both have are compared, and its loss shifts "
        "by the logarithm of the ratio of the padded sizes ([guide](../guides/megatron-state.md#the-vocabulary)).", "",
        "Mamba's kernels need a GPU: `tests/jobs/megatron/mamba.py` has them in torch operations, and "
        "`tests/jobs/megatron/mamba_spec.py` the layers without TransformerEngine. The model of the test is a hybrid: "
        "Mamba, attention and MLP layers.", "",
        "| script | saved under | loaded under | result |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in ROWS:
        if row.name in results:
            result = results[row.name].replace("|", "/")
            lines.append(f"| `{row.script}` | {layout(row.source)} | {layout(row.target)} | {result} |")
    lines += [
        "", "`pretrain_vlm.py` (LLaVA) accepts `--ckpt-format torch` only, by a check of its own, and its vision model needs "
        "TransformerEngine's norm. Its rows are without that check and with torch's norm "
        "(`tests/jobs/megatron/pretrain.py`); the unchanged script saves without unickpt. "
        "The multimodal example (`examples/multimodal/train.py`) was not run: it needs TransformerEngine and megatron-energon. "
        "Megatron removed `pretrain_bert.py` and `pretrain_t5.py` after 0.17.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
