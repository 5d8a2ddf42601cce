"""Extensions of benchbox by a third party: one of each kind."""
