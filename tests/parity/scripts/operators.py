"""Declaration of torchvision's operators beside a torch without CUDA, for which its wheel has none. Import it before lerobot."""

import torch

if torch.version.cuda is None:
    for operator in ("nms", "qnms"):
        torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
