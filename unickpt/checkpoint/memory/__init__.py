"""Checkpoints in the memory of hosts, with replicas on other hosts. They load at any world size, like those on disk.

Gemini (SOSP '23) and ByteRobust keep checkpoints in the memory of other machines, for the same layout. Here a generation has
the very files of a checkpoint on disk, so that every loader reads it, under any layout, and the same checksums hold.
"""
