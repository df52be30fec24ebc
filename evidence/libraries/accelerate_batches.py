"""Whether a job of Accelerate keeps its global batch, and its place in the data, on another number of ranks.

python -m evidence.libraries.accelerate_batches

Jobs of 1, 2 and 4 ranks see the batches of 8 samples of one shuffled order, with ``split_batches=True``: once from the first
step, and once from step 3, as after a load. Every step must have the samples that the uninterrupted job of 2 ranks has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from evidence.libraries.environments import python_of
from tests.support.repository import REPO
from unickpt.testing.launch import environment

RANKS, SAMPLES, BATCH, DONE = (1, 2, 4), 48, 8, 3


def job(out: Path) -> None:
    """Note the samples of each step, in a rank of a job of torchrun."""
    from evidence.libraries.accelerate import _on_cpu

    _on_cpu()
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader

    set_seed(5)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True))  # type: ignore[arg-type]
    every = [sorted(accelerator.gather(batch).tolist()) for batch in loader]
    loader.set_epoch(0)
    rest = [sorted(accelerator.gather(batch).tolist()) for batch in accelerator.skip_first_batches(loader, DONE)]
    if accelerator.is_main_process:
        out.write_text(json.dumps([every, rest]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m evidence.libraries.accelerate_batches")
    parser.add_argument("--environments", type=Path, default=REPO / ".venv-libraries", help="folder of the environments")
    args = parser.parse_args()
    python, found = python_of("accelerate", args.environments.resolve()), {}
    with tempfile.TemporaryDirectory(prefix="unickpt-libraries-") as temporary:
        for ranks in RANKS:
            out = Path(temporary) / f"{ranks}.json"
            module = ["-m", "evidence.libraries.accelerate_batches", "--job", str(out)]
            launch = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            subprocess.run([*launch, *module], env=environment(), cwd=REPO, check=True)
            found[ranks] = json.loads(out.read_text())
    every = found[2][0]
    equal = {ranks: each == [every, every[DONE:]] for ranks, each in found.items()}
    print(f"batches of {len(every[0])} samples, {len(every)} steps; as those of 2 ranks: {equal}")
    return int(not all(equal.values()) or len(every[0]) != BATCH)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(Path(sys.argv[2]))
        sys.exit(0)
    sys.exit(main())
