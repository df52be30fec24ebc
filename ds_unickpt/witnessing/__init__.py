"""The witness of an engine: what its optimizer holds on this rank, and the hooks on its steps."""
