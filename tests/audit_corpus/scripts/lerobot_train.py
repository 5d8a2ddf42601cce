"""lerobot-train, beside a torch without CUDA, for which torchvision's wheel has no operators: two are declared."""

import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

if __name__ == "__main__":
    from lerobot.scripts.lerobot_train import main

    main()
