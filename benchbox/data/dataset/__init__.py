"""Open datasets: frames, actions, states and images by index."""
