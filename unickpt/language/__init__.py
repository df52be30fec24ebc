"""The universal checkpoint language: how frameworks and model families arrange the same parameters.

arrangement.py   axes of a tensor's dimensions
names.py         names of tensors with holes
sizes.py         sizes of axes, as formulas
facts.py         what is known of a model, for these formulas
rules.py         a tensor of one dialect, and those of another one that have its elements
dialect.py       rules in a file
shipped.py       the files that come with the package, and which of them is meant
pieces.py        which elements of one tensor are which of another: what rules come down to
translation.py   all tensors that are wanted, from those that there are
"""
