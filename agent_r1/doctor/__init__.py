"""Find out what is wrong with a recipe before training, or with a run afterwards."""
