"""Settings of all tests."""

from hypothesis import settings

# An example may take as long as the machine makes it: the time limit of the test bounds it. A failing example prints the line
# that replays it.
settings.register_profile("project", deadline=None, print_blob=True)
settings.load_profile("project")
