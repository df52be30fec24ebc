"""Dialect language: arrangement of the same parameters by different frameworks and model families.

arrangement.py            axes of the dimensions of a tensor
name_templates.py         tensor names with holes
sizes.py                  formulas for the sizes of axes
model_facts.py            facts about a model, used in formulas
rules.py                  a tensor of one dialect, and the tensors of another dialect with the same elements
dialect.py                files with rules
registry.py               dialects of the package, and the choice of one
pieces.py                 maps between elements of tensors
translation.py            maps of all wanted tensors from the given tensors
translated_checkpoint.py  a checkpoint that is read under the names and shapes of another dialect
hf_layouts.py             layouts of transformers in memory and in files
"""
