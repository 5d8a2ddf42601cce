"""Resize an image with openpi's own client: resize.py FOLDER.

FOLDER has `image.safetensors` with an `image` (H, W, 3) uint8, and `sizes.json`. `resized.safetensors` is written into it.
"""

import json
import sys
from pathlib import Path

from openpi_client.image_tools import resize_with_pad
from safetensors.numpy import load_file, save_file

folder = Path(sys.argv[1])
image = load_file(folder / "image.safetensors")["image"]
sizes = json.loads((folder / "sizes.json").read_text())
save_file(
    {f"{height} x {width}": resize_with_pad(image, height, width) for height, width in sizes}, folder / "resized.safetensors"
)
