"""Datasets: LeRobot readers and writers, recording from a simulator, and the stream of micro-batches for training."""

from benchbox.data.dataset.lerobot import LeRobotDataset, open_dataset
from benchbox.data.writing.writer import LeRobotWriter

__all__ = ["LeRobotDataset", "LeRobotWriter", "open_dataset"]
