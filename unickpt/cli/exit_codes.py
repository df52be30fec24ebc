"""The exit codes of every command (docs/cli.md lists them)."""

SOUND = 0  # done, and what was looked at is in order
DAMAGED = 1  # done, and what was looked at is damaged, differs, or has a problem
UNUSABLE = 2  # nothing could be looked at: no checkpoint there, a newer format, wrong usage (argparse uses 2, too)
NONE = 3  # `unickpt latest`: there is no checkpoint, which is not an error before the first save
INTERRUPTED = 130  # by Ctrl-C, as in shells
