"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# An example may take as long as the machine makes it, and so may its choice: the time limit of the test bounds both. A failing
# example prints the line that replays it.
settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("project")
