"""The work of each command, apart from parsing its arguments. Importing one may import torch."""
