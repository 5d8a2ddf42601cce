"""The rank side of a launch: runs a session under instruments, and writes events and one result file."""
