"""Made-up jobs of any size with a fault in them, as the detectors would see them. The same for the same seed.

layout      ranks and communicators
calls       who comes to stand where when a rank does something else
steps       what ranks and links take, and how one that is slow holds up all
faults      all of that put together
"""
