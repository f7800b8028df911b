"""What the local engine does differently on a GPU."""
