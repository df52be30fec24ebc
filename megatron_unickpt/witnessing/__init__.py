"""The witness of a Megatron job: what its optimizer holds on this rank, and the hooks on its steps."""
