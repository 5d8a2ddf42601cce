"""Datasets: reading and writing LeRobot, recording from a simulator, and the stream of micro-batches a policy trains on."""

from benchbox.data.lerobot import LeRobotDataset, open_dataset
from benchbox.data.writer import LeRobotWriter

__all__ = ["LeRobotDataset", "LeRobotWriter", "open_dataset"]
