"""Submission of a command to Slurm: its options, the sbatch script, and the job."""
