"""The witness of a training loop of one's own: which tensors a rank holds, what the ranks tell each other, what is counted."""
