"""Operators of torchvision, declared beside a torch without CUDA, for which its wheel has none; import it before lerobot."""

import torch

if torch.version.cuda is None:
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
