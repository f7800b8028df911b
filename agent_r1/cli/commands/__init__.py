"""What the commands do, one module each, apart from reading the command line. Importing one may import torch."""
