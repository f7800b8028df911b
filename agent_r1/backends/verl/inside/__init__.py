"""Code that runs in the processes of verl and Ray."""
