"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, nothing about the code.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")
