"""Prints what must not depend on an audit: losses, final weights and the state of the random number generator."""

import hashlib

import torch


def print_checksums(tensors, losses):
    for step, loss in enumerate(losses):
        print("result", "loss", step, float(loss).hex())
    digest = hashlib.sha256()
    for tensor in tensors:
        tensor = tensor.detach()
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        digest.update(tensor.double().cpu().contiguous().numpy().tobytes())
    print("result", "weights", digest.hexdigest())
    print("result", "random", torch.rand(()).item().hex(), flush=True)
