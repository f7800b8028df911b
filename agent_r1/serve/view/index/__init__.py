"""What the viewer knows of all episodes of a run without reading them again: numbers, texts on disk, metrics."""
