"""Files of dialects and what they take from a model: read, refused, and those that are shipped."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.repository import REPO
from tests.support.translations import carried_out, numbered
from unickpt.base.errors import LanguageError, MismatchError
from unickpt.transform.dialects.dialect import parse
from unickpt.transform.dialects.model_facts import FACTS, Model
from unickpt.transform.dialects.name_templates import Template
from unickpt.transform.dialects.registry import choose, dialect, is_unread
from unickpt.transform.dialects.rules import Rule
from unickpt.transform.dialects.sizes import names_in
from unickpt.transform.dialects.translation import counterpart_shapes, translate

HEAD = '[dialect]\nname = "a"\nother = "b"\nfamilies = ["x"]\nstack = ["layer"]\n[sizes]\nn = "heads / 2"\n'
RULE = '[[rules]]\nhere = "l.{layer}.w [n m]"\nthere = "k.{layer}.w [m n]"\n'


def test_a_file() -> None:
    found = parse(HEAD + RULE)
    assert (found.name, found.other, found.families) == ("a", "b", ("x",))
    assert [str(rule.here) for rule in found.rules] == ["l.{layer}.w [n m]", "l.w [layer n m]"]
    assert found.sizes_of({"heads": 8}) == {"n": 4}
    assert found.sizes_of({}) == {}
    with pytest.raises(LanguageError, match=r"size of 'n'.*not a whole number"):
        found.sizes_of({"heads": 7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not toml [", "not TOML"),
        (HEAD, "no rules"),
        (HEAD.replace("[dialect]", "[dialekt]") + RULE, "unknown key 'dialekt'"),
        (HEAD.replace('name = "a"\n', "") + RULE, r"\[dialect\] has no 'name'"),
        (HEAD.replace('["x"]', '"x"') + RULE, "'families' is 'x', expected list"),
        (HEAD.replace('["x"]', "[1]") + RULE, "expected a list of strings"),
        (HEAD.replace("stack =", 'unread = ["{a"]\nstack =') + RULE, r"\[dialect\] unread: .*a hole is"),
        (HEAD.replace("heads / 2", "heads.__class__") + RULE, "size of 'n'"),
        (HEAD.replace('"heads / 2"', "[1]") + RULE, "expected a formula"),
        (HEAD + RULE + "code = 1\n", "rule 1: unknown key 'code'"),
        (HEAD + RULE + RULE.replace("[m n]", "[m o]"), "rule 2: .*'n' is an index only here"),
        (HEAD + RULE.replace("there", "their"), "rule 1: unknown key 'their'"),
        (HEAD + RULE.replace(" [n m]", "").replace(" [m n]", ""), "needs an arrangement"),
        (HEAD + RULE.replace("l.{layer}", "l{layer}"), "does not follow a dot"),
        (HEAD + RULE + 'repeat = {z = "mean"}\n', "repeat has 'z'"),
        ("a = " + "[" * 5000, "not TOML"),
        (HEAD.replace("heads / 2", "hoods / 2") + RULE, "size of 'n'.*'hoods' is not a fact"),
        (HEAD.replace('"heads / 2"', "-3") + RULE, "size of 'n'.*-3 is not a valid size"),
        ("# " + "x" * (1 << 20), "too many for a dialect"),
    ],
)
def test_files_that_are_none(text: str, message: str) -> None:
    with pytest.raises(LanguageError, match=message):
        parse(text)


def test_tensors_that_no_model_reads() -> None:
    """The copy of Megatron-DeepSpeed's embeddings on the last stage of a pipeline, but not the one that the model reads."""
    copy, own = "tied_modules.embed@6.position_embeddings.weight", "tied_modules.embed.position_embeddings.weight"
    pipe = "megatron-deepspeed-pipe"
    found = [is_unread(pipe, copy), is_unread(pipe, own), is_unread("huggingface", copy), is_unread("", copy)]
    assert found == [True, False, False, False]
    words = copy.replace("position", "word")
    assert not is_unread(pipe, words)


@pytest.mark.parametrize("path", sorted((REPO / "configs" / "dialects").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_dialects_match_their_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    tomllib = pytest.importorskip("tomllib")
    schema = json.loads((REPO / "configs" / "dialect.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(tomllib.loads(path.read_text()))
    made = parse(path.read_text(), where=path.name)
    assert all(dialect(made.name, family, other=made.other) for family in made.families)
    assert {fact for rule in made.rules for item in (rule.here, *rule.there) for fact in item.name.facts} <= set(FACTS)
    assert {name for formula in made.sizes.values() for name in names_in(formula)} <= set(FACTS)


def gpt2(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' GPT-2 with a head of its own."""
    inner = {
        "ln_1.weight": (hidden,), "ln_1.bias": (hidden,), "ln_2.weight": (hidden,), "ln_2.bias": (hidden,),
        "attn.c_attn.weight": (hidden, 3 * hidden), "attn.c_attn.bias": (3 * hidden,), "attn.c_proj.bias": (hidden,),
        "attn.c_proj.weight": (hidden, hidden), "mlp.c_fc.weight": (hidden, 5), "mlp.c_fc.bias": (5,),
        "mlp.c_proj.weight": (5, hidden), "mlp.c_proj.bias": (hidden,),
    }  # fmt: skip
    outer = {"transformer.wte.weight": (23, hidden), "transformer.wpe.weight": (6, hidden), "lm_head.weight": (23, hidden),
             "transformer.ln_f.weight": (hidden,), "transformer.ln_f.bias": (hidden,)}  # fmt: skip
    return outer | {f"transformer.h.{at}.{name}": shape for at in range(layers) for name, shape in inner.items()}


def llama(layers: int, hidden: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of transformers' Llama; of queries and keys, the rows."""
    inner = {
        "input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,), "self_attn.q_proj.weight":
        (queries, hidden), "self_attn.k_proj.weight": (keys, hidden), "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries), "mlp.gate_proj.weight": (5, hidden), "mlp.up_proj.weight": (5, hidden),
        "mlp.down_proj.weight": (hidden, 5),
    }  # fmt: skip
    outer = {"model.embed_tokens.weight": (23, hidden), "model.norm.weight": (hidden,), "lm_head.weight": (23, hidden)}
    return outer | {f"model.layers.{at}.{name}": shape for at in range(layers) for name, shape in inner.items()}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("name", ["megatron-deepspeed", "megatron-deepspeed-pipe"])
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_megatron_deepspeed_round_trip(
    name: str, family: str, layers: int, groups: int, query: int, head: int, thirds: bool
) -> None:
    """Every element once, in both directions; rows of queries, keys and values are where the code of a job looks for them."""
    groups, heads = (groups, groups * query) if family == "llama" and not thirds else (groups * query, groups * query)
    facts = {"layers": layers, "heads": heads, "groups": groups, "head_dim": head, "vocab": 23}
    facts["qkv_blocks"] = 1 if thirds else groups
    hidden = heads * head
    there = gpt2(layers, hidden) if family == "gpt2" else llama(layers, hidden + 1, hidden, groups * head)
    found = dialect(name, family).of_model(facts)
    sizes = found.sizes_of(facts)
    arrays = numbered(there)
    here = counterpart_shapes(found.rules, there, sizes)
    assert len(here) == len(there) - (3 * layers if family == "llama" else 0)
    padded = {key: (26, *shape[1:]) if shape[0] == 23 else shape for key, shape in here.items()}
    inward = translate(found.rules, padded, there, sizes)
    assert (inward.unmatched, inward.without, inward.unused) == ([], {}, [])
    whole = carried_out(inward, numbered(padded), arrays)
    back = translate(found.rules, there, padded, sizes, outward=True)
    assert (back.unmatched, back.without, back.unused) == ([], {}, [])
    again = carried_out(back, arrays, whole)
    assert all(np.array_equal(again[key], arrays[key]) for key in there)
    first = "2." if name.endswith("pipe") else "language_model.encoder.layers.0."
    assert f"{layers + 2}.weight" in here or first != "2."
    fused = whole[f"{first}self_attention.query_key_value.weight"]
    if family == "gpt2":
        q, k, v = np.split(arrays["transformer.h.0.attn.c_attn.weight"].T, 3)
    else:
        q, k, v = (arrays[f"model.layers.0.self_attn.{each}_proj.weight"] for each in "qkv")
    if thirds:
        assert np.array_equal(fused, np.concatenate([q, k, v]))
    else:  # transformer.py before FPDT: view(groups, heads / groups + 2, head), split_tensor
        mixed = fused.reshape(groups, heads // groups + 2, head, -1)
        assert np.array_equal(mixed[:, :-2].reshape(q.shape), q)
        assert np.array_equal(mixed[:, -2].reshape(k.shape), k)
        assert np.array_equal(mixed[:, -1].reshape(v.shape), v)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(LanguageError, match=r"for the family 'bert'; known are .*llama"):
        dialect("megatron-core", "bert")
    with pytest.raises(LanguageError, match=r"the model family is unknown; set --dialect to a family such as"):
        choose("megatron-core", "huggingface", "", "", where="here", option="--dialect")
    with pytest.raises(LanguageError, match=r"unknown; set --config to the folder of a model of the same kind, or --dialect"):
        choose("megatron-core", "huggingface", "", "", where="here", option="--dialect", config="--config")
    with pytest.raises(LanguageError, match=r"unknown; set --config to the folder of a model of the same kind$"):
        choose("megatron-core", "huggingface", "", "", where="here", config="--config")
    with pytest.raises(LanguageError, match="cannot read"):
        choose("megatron-core", "huggingface", "/nowhere.toml", "", where="here", option="--dialect")
    with pytest.raises(LanguageError, match=r"for the family '/nowhere.toml'"):  # what a checkpoint says is no path
        choose("megatron-core", "huggingface", "", "/nowhere.toml", where="here", option="--dialect")


def test_numbers_from_model_facts() -> None:
    template = Template.parse("{= 2 * layers + 2}.{*kind}")
    assert template.facts == {"layers"}
    assert template.match("6.weight") is None  # before anything is known
    with pytest.raises(LanguageError, match="the facts of this formula are unknown"):
        template.fill({"kind": "weight"})
    known = template.with_facts({"layers": 2, "heads": 3})
    assert known.match("6.weight") == {"kind": "weight"}
    assert known.match("7.weight") is None
    assert known.fill({"kind": "bias"}) == "6.bias"
    assert Template.parse(str(template)) == template
    rule = Rule.parse("{= layers}.w", "last.w")
    assert translate([rule.with_facts({"layers": 3})], {"3.w": (2,)}, {"last.w": (2,)}, {}).pieces.keys() == {"3.w"}
    with pytest.raises(LanguageError, match=r"rule \{= layers\}.w = last.w: .*'layers' is unknown"):
        rule.with_facts({})
    made = parse(HEAD + RULE.replace("l.{layer}", "{= heads}.{layer}").replace("k.", "k"))
    assert made.of_model({"heads": 7}).rules[0].here.name.fill({"layer": 1}) == "7.1.w"
    for text in ("a{=}", "a{= 3}", "a{= x.y}", "{= layers}{n}", "{n}1{= layers}"):
        with pytest.raises(LanguageError):
            Template.parse(text)
    with pytest.raises(LanguageError, match=r"rule 1: .*'hoods' is not a fact"):
        parse(HEAD + RULE.replace("l.{layer}", "{= hoods}.{layer}"))


def test_two_families_are_two_models() -> None:
    with pytest.raises(MismatchError, match="family 'gpt2', this job's model has 'qwen2'"):
        Model("qwen2").with_more(Model("gpt2"), "here")
    with pytest.raises(MismatchError, match="8 attention heads of queries, this job's model has 4"):
        Model("", {"heads": 4}).with_more(Model("gpt2", {"heads": 8}), "here")
