"""Faults made on purpose: ``python -m evidence.faults`` counts them, and ``test_faults.py`` checks a few of each."""
