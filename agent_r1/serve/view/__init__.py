"""The viewer: a local web page over run directories, the same as one file, and in the terminal."""
