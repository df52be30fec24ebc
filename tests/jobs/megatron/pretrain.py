"""Run the unmodified ``pretrain_gpt.py``, or another script, of ``$MEGATRON_LM`` on CPU and gloo, under torchrun.

MEGATRON_LM=/path/to/Megatron-LM torchrun --nproc-per-node 4 -m tests.jobs.megatron.pretrain <arguments of Megatron>

With ``SCRIPT=pretrain_bert.py`` that script of the tree runs, with arguments of its own (``SCRIPTS``).
With ``FOLDER_OF_RANK=PATH{}`` every rank works in a directory of its own, so that a relative path is another one on each.
With ``BREAK_SAVE=FUNCTION`` (``module.function`` of ``megatron_unickpt``) that function raises on rank 1 while a job saves.
With ``FALL_BACK_AT=N`` no rank can describe its state at iteration N, so that Megatron saves this checkpoint in its own format.
With ``WAIT_AFTER_SAVES=N`` training pauses after each N-th save until all saves have ended, so that several end before a poll.
With ``WITHOUT_UNICKPT=1`` an import of unickpt fails in the script, as if it were not installed; this harness is a part of it.
With ``KILL_AFTER_SAVES=N`` the ranks kill themselves after N saves, when the copies of the last one in memory are complete.
With ``RECORD_BATCHES=FILE`` the micro batches that a job of one rank trains on are written there when it ends.
"""

from __future__ import annotations

import atexit
import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_unickpt.testing import cpu
from tests.jobs.megatron.mamba import adapt_stack, offer_mamba_ssm
from unickpt.checkpoint.save import shutdown

# Arguments of every run on CPU, with sizes that two cores train in seconds.
COMMON = (
    "--distributed-backend gloo --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --num-workers 0 --split 90,5,5 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 100 "
    "--clip-grad 1.0 --hidden-dropout 0 --attention-dropout 0 --no-masked-softmax-fusion --no-gradient-accumulation-fusion "
    "--no-persist-layer-norm --no-rope-fusion --no-bias-dropout-fusion --eval-iters 0 --eval-interval 1000 --log-interval 1 "
)
TOKENS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 4095 --num-layers 4 --seq-length 32 "
UNTIED_ROPE = "--position-embedding-type rope --untie-embeddings-and-output-weights "
ARGUMENTS = f"{COMMON} {TOKENS} {UNTIED_ROPE} --transformer-impl local"
SCRIPTS = {
    "pretrain_gpt.py": ARGUMENTS,
    "pretrain_mamba.py": f"{COMMON} {TOKENS} {UNTIED_ROPE} --spec tests.jobs.megatron.mamba_spec stack "
    "--hybrid-override-pattern M*-M --mamba-num-groups 2 --mamba-state-dim 8 --mamba-head-dim 16",
    "pretrain_bert.py": f"{COMMON} --spec local --num-layers 4 --seq-length 32 "
    "--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --eval-iters 1",
    "pretrain_t5.py": f"{COMMON} --transformer-impl local --encoder-num-layers 2 --decoder-num-layers 2 "
    "--encoder-seq-length 32 --decoder-seq-length 16 --vocab-extra-ids 100 --kv-channels 16 --ffn-hidden-size 128 "
    "--legacy-tokenizer --tokenizer-type BertWordPieceLowerCase --eval-iters 1",
    "pretrain_vlm.py": f"{COMMON} {TOKENS} --transformer-impl local --decoder-num-layers 4 "
    "--img-h 56 --img-w 56 --patch-dim 14 --dataloader-seq-length 32",
}
ONLY_TORCH = "assert args.ckpt_format == 'torch'"  # of ``pretrain_vlm.py``, whose model can be saved in any format


def record_batches(file: str) -> None:
    """Keep tokens, labels and loss masks of the script's own data loader: ``[micro batches, 1, length]`` each."""
    import megatron.core.utils
    import megatron.training.utils

    module = megatron.training.utils
    if not hasattr(module, "get_batch_on_this_tp_rank"):  # the development branch
        module = megatron.core.utils
    original, found = module.get_batch_on_this_tp_rank, []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        found.append({key: batch[key].cpu().clone() for key in ("tokens", "labels", "loss_mask")})
        return batch

    module.get_batch_on_this_tp_rank = recorded
    atexit.register(lambda: torch.save({key: torch.stack([batch[key] for batch in found]) for key in found[0]}, file))


def break_save(function: str) -> None:
    """Make a function of unickpt raise on rank 1, as for an unexpected layout."""
    module_name, _, name = function.rpartition(".")
    module = importlib.import_module(f"megatron_unickpt.{module_name}")
    original = getattr(module, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if torch.distributed.get_rank() == 1 and not kwargs.get("is_loading"):
            return [][len(args) + 1]
        return original(*args, **kwargs)

    setattr(module, name, broken)


def fall_back_at(iteration: int) -> None:
    """Let the state of one iteration be one that unickpt does not support."""
    from megatron_unickpt.dist_checkpointing import capture
    from unickpt.base.errors import UnsupportedLayoutError

    original = capture.contribution

    def refusing(state: Any, common: Any, **kwargs: Any) -> Any:
        if common.get("iteration") == iteration:
            raise UnsupportedLayoutError(f"iteration {iteration} is not supported")
        return original(state, common, **kwargs)

    capture.contribution = refusing


def wait_after(saves: int) -> None:
    """Pause after each n-th save of the scripts, as garbage collection or a slow rank does."""
    from megatron.training import training

    original, done = training.save_checkpoint_and_time, [0]

    def counted(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        done[0] += 1
        if done[0] % saves == 0:
            shutdown.finish_all(ending=False)

    training.save_checkpoint_and_time = counted


def kill_after(saves: int) -> None:
    """End the ranks without any warning after a number of saves of the scripts."""
    from megatron.training import training

    original, left = training.save_checkpoint_and_time, [saves]

    def counted(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        left[0] -= 1
        if not left[0]:
            shutdown.finish_all(ending=False)
            torch.distributed.barrier()
            os.kill(os.getpid(), signal.SIGKILL)

    training.save_checkpoint_and_time = counted


def hide_unickpt() -> None:
    """Let every later import of unickpt raise ImportError."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("unickpt", "megatron_unickpt")]:
        del sys.modules[name]
    sys.modules |= {"unickpt": None, "megatron_unickpt": None}  # type: ignore[dict-item]  # how Python marks it


def main() -> None:
    tree = os.environ["MEGATRON_LM"]
    sys.path.insert(1, tree)  # after the project, which also has a ``tests``
    if "WITHOUT_UNICKPT" in os.environ:
        hide_unickpt()
    script = os.environ.get("SCRIPT", "pretrain_gpt.py")
    if script == "pretrain_mamba.py":
        offer_mamba_ssm()
    cpu.adapt_megatron()
    if script == "pretrain_mamba.py":
        adapt_stack()
    if script == "pretrain_bert.py":
        from megatron.core.models.bert import bert_layer_specs

        bert_layer_specs.bert_layer_with_transformer_engine_spec = None  # the script imports it even with --spec local
    if script == "pretrain_vlm.py":
        from megatron.core.models.vision.clip_vit_model import CLIPViTModel
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

        # Without TransformerEngine its norm is one of torch, which does not take the arguments that it is given.
        defaults = CLIPViTModel.__init__.__defaults__ or ()
        CLIPViTModel.__init__.__defaults__ = tuple(
            WrappedTorchNorm if each is torch.nn.LayerNorm else each for each in defaults
        )
    if "FOLDER_OF_RANK" in os.environ:
        os.chdir(os.environ["FOLDER_OF_RANK"].format(os.environ["RANK"]))
    if "BREAK_SAVE" in os.environ:
        break_save(os.environ["BREAK_SAVE"])
    if "FALL_BACK_AT" in os.environ:
        fall_back_at(int(os.environ["FALL_BACK_AT"]))
    if "WAIT_AFTER_SAVES" in os.environ:
        wait_after(int(os.environ["WAIT_AFTER_SAVES"]))
    if "KILL_AFTER_SAVES" in os.environ:
        kill_after(int(os.environ["KILL_AFTER_SAVES"]))
    if "RECORD_BATCHES" in os.environ:
        record_batches(os.environ["RECORD_BATCHES"])
    sys.argv = [os.path.join(tree, script), *SCRIPTS[script].split(), *sys.argv[1:]]
    # in this module, because processes that Megatron spawns import the main module, and need the harness
    text = Path(sys.argv[0]).read_text()
    if script == "pretrain_vlm.py":
        assert ONLY_TORCH in text
        text = text.replace(ONLY_TORCH, "assert True")
    exec(compile(text, sys.argv[0], "exec"), globals())


if __name__ == "__main__":
    main()
