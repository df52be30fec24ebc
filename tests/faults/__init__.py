"""Faults made on purpose: what ``scripts/faults.py`` counts, and ``tests/test_faults.py`` sees a handful of."""
