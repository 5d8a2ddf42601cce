"""What can be audited: a session of benchbox, a checkpoint, any training command. Each gives the facts of its ranks."""
