"""Numbers that are silently wrong: how they are noticed, and which rank they are of.

All is pure but ``hashes``, which imports torch. Adapters take the hashes of what a rank holds and hand them to ``vote``.
"""
