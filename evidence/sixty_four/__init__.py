"""Jobs of 64 ranks on one machine. Their ranks are forks of one process, so that they share its imports."""
