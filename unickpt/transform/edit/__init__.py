"""Editing: write a new checkpoint from one or several others. Each step is a pure function of a table of tensors.

table.py             table of tensors, each with the function that reads it
patterns.py          selection of tensors by name and state
select.py            drop and keep tensors, remove the optimizer
cast.py              change dtypes
rename.py            change names
apply_dialect.py     apply the rules of a dialect
resize_vocab.py      change the number of rows of the vocabulary
merge_lora.py        merge adapters into the model
round_weights.py     round weights to few bits
residuals.py         residuals of compressed gradients for another number of ranks, or none
transformers_names.py  the names of transformers
average.py           mean of several checkpoints
table_checkpoint.py  a table with the interface of a checkpoint
write.py             a table as a source of ``unickpt.transform.convert.pipeline``
remove_tensors.py    removal of tensors in place
"""
