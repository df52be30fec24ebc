"""The Megatron adapter. Not part of this release: ``--ckpt-format unickpt`` is the next one's."""
