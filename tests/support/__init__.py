"""Code shared by test modules: functions and Programs to test, schedules to force, and checks of results."""
