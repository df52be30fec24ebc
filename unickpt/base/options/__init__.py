"""The options: declared once, read from a section of JSON, from flags or from ``--rdzv-conf``."""
