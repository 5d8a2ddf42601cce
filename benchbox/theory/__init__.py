"""What a step costs by formula: predictions that need no run."""
