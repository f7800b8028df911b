"""Data: rows from files, datasets and Python, the hash of evaluation rows, downloads. Imports no torch."""
