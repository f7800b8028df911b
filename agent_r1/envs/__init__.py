"""What answers: environments, their checks, and the processes that host them. Imports no torch."""
