"""Self-tests of the hooks, for frameworks whose source has changed."""
