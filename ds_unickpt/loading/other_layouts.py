"""DeepSpeed's own checkpoint under another layout: why DeepSpeed refuses it, and the command that makes one for any layout.

DeepSpeed loads its own files only under the number of ranks, the ZeRO stage and the precision that saved them. Elsewhere it
raises errors of many classes, some without text. The text is appended here, and the class stays.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unickpt.base.errors import UnickptError
from unickpt.checkpoint.format.file_names import LATEST_FILE
from unickpt.checkpoint.load.validation import is_checkpoint
from unickpt.checkpoint.storage.base import is_url
from unickpt.transform.convert import run_folder
from unickpt.transform.convert.deepspeed.files import MODEL, OPTIMIZER, UNIVERSAL_LATEST, File, is_deepspeed, read_file
from unickpt.transform.convert.deepspeed.universal_reader import FOLDER, is_universal
from unickpt.transform.convert.pickles.lazy_tensor import OpenFiles

_KEY = ', with "unickpt": {"enabled": true} in the DeepSpeed JSON'


@dataclass(frozen=True, slots=True)
class FilesLayout:
    """What DeepSpeed's files depend on.

    Attributes:
        stage: ZeRO stage.
        precision: ``fp32``, ``bf16`` or ``fp16``; '' if it is unknown.
        data: number of data parallel ranks.
        model: number of model parallel ranks: pipeline stages times tensor parallel ranks.
    """

    stage: int
    precision: str
    data: int
    model: int

    def __str__(self) -> str:
        words = [f"ZeRO stage {self.stage}", self.precision, f"{self.data} data parallel rank{'s' * (self.data != 1)}"]
        return ", ".join(filter(None, [*words, f"{self.model} model parallel ranks" * (self.model != 1)]))

    def loads(self, saved: FilesLayout) -> bool:
        """Whether DeepSpeed loads its own checkpoint of another layout under this one."""
        precision = not saved.precision or saved.precision == self.precision
        ranks = self.data == saved.data or self.stage == 0  # without ZeRO, one rank has everything
        return precision and ranks and _form(self.stage) == _form(saved.stage) and self.model == saved.model


def with_advice(error: Exception, engine: Any, load_dir: Any, tag: Any, *, enabled: bool) -> Exception:
    """Return an error of DeepSpeed's ``load_checkpoint`` with advice in its text; the error itself if there is none to give.

    ``enabled``: the job's configuration enables unickpt.
    """
    try:
        text = "" if is_url(str(load_dir)) else _advice(error, engine, Path(load_dir), tag, enabled=enabled)
        return _appended(error, text) if text else error
    except Exception:  # DeepSpeed's own error is shown
        return error


def _advice(error: Exception, engine: Any, load_dir: Path, tag: Any, *, enabled: bool) -> str:
    universal = bool(engine.load_universal_checkpoint())
    pointer = load_dir / (UNIVERSAL_LATEST if universal else LATEST_FILE)
    name = str(tag) if tag is not None else pointer.read_text().strip()
    folder = load_dir / name
    if not is_deepspeed(folder) or is_checkpoint(folder):
        return ""
    lacking = _lacking(error, folder) if universal else ""
    if lacking:
        return (
            f"{folder} has no states of {lacking}, which this job trains: it was frozen, or no step had used it, when the "
            "folder was made. DeepSpeed's universal loading needs states of all parameters that a job trains. Freeze it in "
            'this job, or load the checkpoint with unickpt and "missing_state": "fresh" in "unickpt" of the DeepSpeed JSON.'
        )
    saved, here = _saved(folder), _layout_of(engine)
    fits = _form(here.stage) == _form(saved.stage) if universal and is_universal(folder) else here.loads(saved)
    missing = "" if is_universal(folder) else _missing(folder, saved)
    if missing and (not fits or isinstance(error, FileNotFoundError)):
        return f"{folder} is incomplete: {missing}. 'unickpt convert' cannot read it either; use another checkpoint."
    if fits:
        return ""
    made = run_folder.suggested(load_dir, name, is_done=is_checkpoint)
    command = f"unickpt convert {shlex.quote(str(made.source.absolute()))} {shlex.quote(str(made.directory.absolute()))}"
    what = "This was done before:" if made.done else "Make a checkpoint that loads under any layout:"
    return (
        f"DeepSpeed saved {folder} under {saved}; this job has {here}. DeepSpeed loads its own checkpoints only under the "
        f"layout that saved them. {what}\n    {command}\nThen {_resumed(made, name, tag)}{'' if enabled else _KEY}."
    )


def _resumed(made: run_folder.Suggested, name: str, tag: Any) -> str:
    """Return how a job loads the converted checkpoint."""
    directory = str(made.directory.absolute())
    if made.program == run_folder.TRAINER:
        return f"resume with --resume_from_checkpoint {shlex.quote(directory)}"
    if made.program == run_folder.ACCELERATE:
        return f"call accelerator.load_state({directory!r})"
    if made.program == run_folder.LIGHTNING:
        return f"pass ckpt_path={directory!r}"
    if tag is not None:
        return f"call load_checkpoint({str(made.directory.parent.absolute())!r}, tag={name!r})"
    return f"call load_checkpoint({directory!r})"


def _layout_of(engine: Any) -> FilesLayout:
    precision = "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    data = int(getattr(engine, "seq_dp_world_size", None) or engine.dp_world_size)
    return FilesLayout(int(engine.zero_optimization_stage()), precision, data, int(engine.mp_world_size))


def _saved(folder: Path) -> FilesLayout:
    """Return the layout that saved a checkpoint: from its first file, or else from the names of its files."""
    names = sorted(path.name for path in folder.iterdir())
    models = [(name, match) for name in names if (match := MODEL.fullmatch(name))]
    optimizers = [(name, match) for name in names if (match := OPTIMIZER.fullmatch(name))]
    stage = 3 if any(match["data"] for _, match in models) else 1 if optimizers else 0
    data = len({match["data"] for _, match in optimizers}) or 1
    by_name = FilesLayout(stage, "", data, len({match["model"] for _, match in models}))
    try:
        with OpenFiles() as files:
            return _described(read_file(folder / models[0][0], files, ()), by_name)
    except (UnickptError, OSError):
        return by_name


def _described(file: File, by_name: FilesLayout) -> FilesLayout:
    config: Mapping[str, Any] = file.get("ds_config", dict, {})
    if not config:
        return by_name
    precision = next((name for name, keys in _PRECISIONS.items() if any(_enabled(config, key) for key in keys)), "fp32")
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, dict) else by_name.stage if zero else 0
    data, model = file.get("dp_world_size", int, by_name.data), file.get("mp_world_size", int, by_name.model)
    return FilesLayout(int(stage), precision, data, model)


_PRECISIONS = {"bf16": ("bf16", "bfloat16"), "fp16": ("fp16",)}


def _enabled(config: Mapping[str, Any], key: str) -> bool:
    section = config.get(key)
    return bool(section.get("enabled")) if isinstance(section, dict) else False


def _missing(folder: Path, saved: FilesLayout) -> str:
    """Return how many optimizer files of a checkpoint are missing, with the first; '' if none is."""
    if saved.stage == 0:
        return ""
    found = {
        (int(match["data"]), int(match["model"])) for path in folder.iterdir() if (match := OPTIMIZER.fullmatch(path.name))
    }
    wanted = [(data, model) for model in range(saved.model) for data in range(saved.data)]
    lost = [each for each in wanted if each not in found]
    if not lost:
        return ""
    data, model = lost[0]
    name = f"*zero_pp_rank_{data}_mp_rank_{model:02d}_optim_states.pt"
    return f"{len(lost)} of its {len(wanted)} optimizer files are missing, such as {name}"


def _lacking(error: Exception, folder: Path) -> str:
    """Return the parameter whose folder an error of a universal load misses; '' if it is another error."""
    if not isinstance(error, FileNotFoundError) or not error.filename:
        return ""
    path, parameters = Path(os.fsdecode(error.filename)), folder / FOLDER
    if parameters not in path.parents or not parameters.is_dir():
        return ""
    name = path.relative_to(parameters).parts[0]
    return "" if (parameters / name).exists() else name


def _form(stage: int) -> int:
    """Return the same number for stages that have the same files."""
    return 1 if stage == 2 else stage


def _appended(error: Exception, text: str) -> Exception:
    """Return an error of the same class with more text, also if its class makes its text of something else than ``args``."""
    own = str(error)
    shown = f"{own}\nunickpt: {text}" if own else f"unickpt: {text}"
    kind = type(error)
    body = {"__str__": lambda _: shown, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    told: Exception = kind.__new__(type(kind.__name__, (kind,), body), *error.args)  # its __init__ may want other arguments
    told.__dict__.update(vars(error))
    if isinstance(error, OSError) and isinstance(told, OSError):
        told.filename = error.filename
    return told.with_traceback(error.__traceback__)
