"""What holds for every test: hypothesis draws the same examples in every run, and is not hurried on a busy machine."""

from hypothesis import HealthCheck, settings

settings.register_profile("motet", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("motet")
