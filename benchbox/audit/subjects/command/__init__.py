"""Any training command as a subject of the audit, unmodified: the observer is injected into the Pythons that it starts."""
