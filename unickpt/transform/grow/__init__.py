"""Growth: a larger model with the same outputs, made of a trained model, with its optimizer states.

refusals.py       reasons against a growth, as values
sizes.py          sizes of the source and of the grown model
origins.py        positions of the elements of the source in the grown tensor
free_values.py    random values that depend on the position alone
grown_tensor.py   reading of a grown tensor, box by box
states.py         rules for weights, masters and moments
configuration.py  the new ``config.json``
step.py           the step for a table of tensors
schedule.py       learning-rate schedule for a grown model
upcycle.py        the step that makes experts of a dense model
folders.py        transformers models as tables, configuration beside the output
"""
