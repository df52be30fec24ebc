"""Loading a checkpoint that all ranks of a job agree on."""
