"""What runs on the other side: in the sandbox, started by path, with nothing but the standard library."""
