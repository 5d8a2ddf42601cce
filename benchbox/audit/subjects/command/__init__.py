"""Any training command as a subject of the audit, unmodified: the witness is put into the Pythons that it starts."""
