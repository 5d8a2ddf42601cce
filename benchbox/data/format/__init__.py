"""LeRobot datasets on disk: layouts, metadata, tables, statistics."""
