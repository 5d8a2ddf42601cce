"""Processes of a launch: launchers, torchrun, user commands, signals, locks, environment variables."""
