"""From verdicts to orders."""
