"""The command line ``unickpt``. Looks at checkpoints and at hooks; never unpickles, never needs a framework."""
