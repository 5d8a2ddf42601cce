"""Helpers shared by tests: example records, facts, small trainings, launchers, datasets, a browser."""
