"""Tensors in files of `torch.distributed.checkpoint` (DCP): shards of any layout, read without running code in the files."""
