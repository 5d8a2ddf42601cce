"""Beside a torch without CUDA, torchvision's wheel has no operators: declare the two that its import asks for."""

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
