"""The observer: what stands inside a training process, watches some of its steps and writes down what it saw.

It sees a session of benchbox and any other training script alike. In a foreign process this folder is all there is of benchbox,
under another name: its modules import torch (from 2.4 on), the standard library and one another, and nothing else.
"""
