"""Layouts of LeRobot datasets on disk, by the version in `meta/info.json`."""
