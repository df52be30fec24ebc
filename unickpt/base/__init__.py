"""What every wing stands on: options, errors, logs, hooks on frameworks, processes and private files."""
