"""The exit codes of every command (docs/reference/cli.md lists them)."""

SOUND = 0  # success; no problem was found
DAMAGED = 1  # success; a problem was found: damage, a difference, a hang
UNUSABLE = 2  # failure: no checkpoint, a newer format, unreadable storage, wrong usage (argparse also uses 2)
NONE = 3  # `unickpt latest`: no checkpoint yet, which is normal before the first save
INTERRUPTED = 130  # Ctrl-C, as in shells
