"""What runs in the processes that verl and Ray start."""
