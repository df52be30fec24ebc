"""The agent of a host: looks at the rings of its ranks once a second, sends what they say to the agent of rank 0's host, and
tells in the log what is wrong.

A process of its own, started by the first rank of the host: it sees ranks that hold the interpreter's lock, are stopped or
dead, and it outlives them. That it is gone or slow changes nothing for training.
"""
