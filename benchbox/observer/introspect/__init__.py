"""Reading a training from its live objects: parameter names, wrappers, the objects of the process, masters."""
