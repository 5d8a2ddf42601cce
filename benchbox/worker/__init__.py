"""The rank side of a launch: a session, instruments around it, events and one result file out of it."""
