"""benchbox: which set-up trains this policy fastest in the memory I have, and is it numerically what I think it is?"""

__version__ = "0.1.0"
