"""The exit codes of every command."""

SOUND = 0  # done, and what was looked at is in order
DAMAGED = 1  # done, and what was looked at is damaged
UNUSABLE = 2  # nothing could be looked at: no checkpoint there, a newer format, wrong usage (as argparse has it)
INTERRUPTED = 130  # by Ctrl-C, as shells have it
