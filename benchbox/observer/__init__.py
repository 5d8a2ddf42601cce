"""Observer: code inside a training process that watches some of its optimizer steps and records facts about them.

It watches a session of benchbox and any other training script in the same way. In a foreign process this package is all there
is of benchbox, under the name `benchbox_observer`: its modules import torch (2.4 or later), the standard library and one
another (relatively), and nothing else.
"""
