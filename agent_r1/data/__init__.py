"""What is asked: rows from files, datasets and Python, evaluation panels, downloads. Imports no torch."""
