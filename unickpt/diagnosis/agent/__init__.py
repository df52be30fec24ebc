"""Agent of a host: reads the rings of its ranks once a second, sends a snapshot to the agent of rank 0's host, and writes
verdicts to the log.

The agent is a separate process, started by the first rank of the host. It sees ranks that hold the interpreter's lock, are
stopped or dead, and outlives them. Training does not depend on it.
"""
