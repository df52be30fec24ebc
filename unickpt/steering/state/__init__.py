"""The state of a job that all agents share, and what changes it. Pure functions."""
