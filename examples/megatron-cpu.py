"""Run ``pretrain_gpt.py`` of a Megatron-LM tree on a machine without a GPU, to try commands with a small model.

Write it into the tree, and start it in place of ``pretrain_gpt.py``, with the same arguments:

    unickpt example megatron-cpu.py --to Megatron-LM
    cd Megatron-LM
    torchrun --nproc-per-node 4 megatron-cpu.py $(cat model.args) --ckpt-format unickpt ...

It needs the packages einops, regex, pybind11, six, pyyaml, pydantic and triton, and Megatron's compiled dataset helpers
(``make`` in ``megatron/core/datasets``). ``--mock-data --tokenizer-type NullTokenizer --vocab-size 4095`` need no data.
"""

import runpy
import sys
from pathlib import Path

from megatron_unickpt.testing import cpu  # before anything of megatron

FLAGS = (
    "--distributed-backend gloo --transformer-impl local --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-rope-fusion "
    "--no-bias-dropout-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm"
)

if __name__ == "__main__":
    tree = Path(__file__).absolute().parent
    sys.path.insert(0, str(tree))
    cpu.adapt_megatron()
    script = str(tree / "pretrain_gpt.py")
    sys.argv = [script, *sys.argv[1:], *FLAGS.split()]
    runpy.run_path(script, run_name="__main__")
