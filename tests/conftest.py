"""For all tests."""

from hypothesis import settings

# no test may fail because the machine is busy
settings.register_profile("unickpt", deadline=None)
settings.load_profile("unickpt")
