"""The public API that ``unickpt/__init__.py`` exports: save, load, convert and export without DeepSpeed or Megatron."""
