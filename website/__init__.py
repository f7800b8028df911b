"""What the documentation site adds to docs/: pages from elsewhere in the repository, the API reference, llms.txt."""
