"""What all tests rely on."""

from __future__ import annotations

import signal

# A shell starts background jobs with SIGINT ignored, children inherit that, and what ignores Ctrl-C cannot be tested by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same of nohup and SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
