"""Surgery: a checkpoint made of another one (or of several) by steps, each a pure function of a table of tensors.

table.py        tensors with how each is read; what steps change
selecting.py    tensors by a pattern of name and state
choosing.py     drop, keep, without the optimizer
casting.py      other types
renaming.py     other names
translating.py  a dialect's rules
vocabulary.py   more or fewer rows of the vocabulary
lora.py         adapters merged into the model
averaging.py    the mean of several checkpoints
viewing.py      a table as a checkpoint, for whoever reads one
writing.py      a table as a source of ``unickpt.converting``
"""
