"""Subjects of an audit: a session of benchbox, a checkpoint, any training command. Each provides the facts of its ranks."""
