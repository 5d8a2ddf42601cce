#!/bin/sh
# Pretraining, then fine-tuning of the saved weights. Arguments go to the second stage.
set -e
python plain.py --save pretrained.pt
python plain.py --load pretrained.pt "$@"
