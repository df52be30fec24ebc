"""The command line ``unickpt``. It runs no pickles and needs no framework."""
