"""Replay of a job's records: what a rank, a host, a link or a cause costs of a step, and what a change would gain.

All modules but ``sources`` and ``parquet_traces`` are pure.
"""
