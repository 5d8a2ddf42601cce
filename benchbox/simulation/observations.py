"""Checks of what an environment returns against the dataset that the policy was trained on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchbox.data.text.prompt import clean_task
from benchbox.errors import ConfigurationError, Problem
from benchbox.simulation.processes import SimulationError

if TYPE_CHECKING:
    from benchbox.simulation.environment import EnvironmentFrame
    from benchbox.simulation.live import LiveInputs

_SHOWN_TASKS = 3


def check_observation(observation: EnvironmentFrame, inputs: LiveInputs, where: str) -> None:
    """Check that an observation has the state and the images of the dataset: padding and resizing would hide another one.

    Args:
        where: seed and step, for messages.

    Raises:
        ConfigurationError: the state is of another width, or the image of a camera is missing or of another size.
        SimulationError: the state is not finite.
    """
    root = inputs.dataset.root
    if (shape := np.shape(observation.state)) != (inputs.state_dim,):
        message = f"the state that the environment returns has shape {shape}, and {root} has {inputs.state_dim} numbers"
        raise ConfigurationError(Problem("--env", message, "name an environment of the robot that the dataset is of"))
    for camera in inputs.cameras:
        if camera not in observation.images:
            names = ", ".join(observation.images) or "no camera"
            message = f"the environment returns images of {names}, and the policy was trained with {', '.join(inputs.cameras)}"
            raise ConfigurationError(Problem("--env", message, "return an image of each camera that the factory is given"))
        image, size = np.asarray(observation.images[camera]), inputs.camera_size(camera)
        if image.shape != (*size, 3) or image.dtype != np.uint8:
            message = f"the image of camera {camera} has shape {image.shape} and dtype {image.dtype}"
            hint = f"return images as they are in {root}: {(*size, 3)}, uint8"
            raise ConfigurationError(Problem("--env", message, hint))
    if not np.isfinite(observation.state).all():
        raise SimulationError(f"{where}: the state that the environment returns is not finite; correct the environment")


def unknown_task(task: str, inputs: LiveInputs) -> str | None:
    """Return a line about an instruction that the policy was not trained on, None for one of the dataset's tasks."""
    tasks = inputs.dataset.tasks
    if clean_task(task) in map(clean_task, tasks):
        return None
    shown = ", ".join(map(repr, tasks[:_SHOWN_TASKS])) + (", ..." if len(tasks) > _SHOWN_TASKS else "")
    return f"the task {task!r} of the environment is none of the {len(tasks)} in {inputs.dataset.root}: {shown}"
