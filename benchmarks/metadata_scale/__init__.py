"""Metadata of very large jobs without their data: size of the index, and time to merge it and to plan a load from it.

The rows of the index are generated as every rank would write them. They go through the code of a save and a load: on the
coordinator ``rank_rows.merge``, ``check_coverage`` and ``to_bytes``; on a rank of another layout ``from_bytes``, the checks of
a load and ``plan_reads``. Nothing is read from disk, except with ``--files``.

    python -m benchmarks.metadata_scale [--cases dense-1 dense-3 moe-1] [--ranks 8960 100096] [--write PAGE.md]
"""
