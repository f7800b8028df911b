"""The side that runs in the sandbox. Imports only the standard library."""
