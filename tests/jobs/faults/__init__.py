"""Faults made on purpose: ``python -m tests.jobs.faults`` counts them, and ``test_faults.py`` checks a few of each."""
