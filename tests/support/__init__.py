"""What several test modules need: functions and Programs to try, schedules to force, and how results are judged."""
