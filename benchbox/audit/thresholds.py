"""Limits that the rules of the audit and the reports share."""

# Effective descent quality (EDQ, arXiv:2405.03637): 1 when every update reaches the weights, 0 when none does.
EDQ_ERROR = 0.5  # below: error
EDQ_WARNING = 0.9  # below: warning
