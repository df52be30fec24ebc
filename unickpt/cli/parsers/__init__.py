"""The arguments of every command, with the standard library alone: ``--help`` waits for no other import."""
