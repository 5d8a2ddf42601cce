"""Introspection of live training objects: parameter names, wrappers, objects of the process, master weights."""
