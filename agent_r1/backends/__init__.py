"""Other programs that can train a recipe. Only runs that choose one import it."""
