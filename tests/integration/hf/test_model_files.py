"""From a model of transformers to another one: no command between needs the folder of the first one again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cli import json_of

pytestmark = [pytest.mark.hf, pytest.mark.timeout(600)]

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=13, max_position_embeddings=64, **sizes))
    model.generation_config.max_length = 17
    model.save_pretrained(str(tmp_path / "source"))
    words = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2, "three": 3}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=TEMPLATE)
    tokenizer.save_pretrained(str(tmp_path / "source"))
    return tmp_path / "source"


def talked(folder: Path) -> tuple[Any, list[int], Any]:
    """Return the model of a folder, what its tokenizer makes of a talk, and the logits of that."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, message = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True)
    assert not any(message.values()), message
    tokens = AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(TALK, tokenize=True, return_dict=False)
    with torch.no_grad():
        return model, tokens, model(torch.tensor([tokens])).logits


def test_export_edit_average_and_grow_need_no_configuration(source: Path, tmp_path: Path) -> None:
    _, tokens, expected = talked(source)
    assert tokens == [1, 2, 3]
    base = str(tmp_path / "base")
    json_of("convert", str(source), base)
    json_of("edit", base, str(tmp_path / "padded"), "--pad-vocabulary-to", "16")
    json_of("edit", base, str(tmp_path / "halved"), "--cast", "*=bfloat16", "--cast", "*=float32")
    json_of("average", str(tmp_path / "mean"), base, str(tmp_path / "halved"))
    json_of("grow", base, str(tmp_path / "large"), "--set", "num_hidden_layers=3", "hidden_size=64", "num_attention_heads=8")
    models = {}
    for name in ("base", "padded", "mean", "large"):
        json_of("export", str(tmp_path / name), str(tmp_path / f"{name}-hf"))
        models[name], found, logits = talked(tmp_path / f"{name}-hf")
        assert found == tokens
        assert models[name].generation_config.max_length == 17
        if name == "mean":  # half of the way to bfloat16
            assert torch.allclose(logits, expected, atol=1e-2)
        else:
            assert torch.allclose(logits[..., :13], expected, atol=0 if name == "base" else 1e-5), name
    assert models["padded"].config.vocab_size == 16
    assert models["large"].config.num_hidden_layers == 3
