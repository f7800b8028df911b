"""What samples: the protocol, a scripted engine and the local one."""
