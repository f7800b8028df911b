"""The wiring: a recipe becomes a task, a model, an engine and a learner. The one reader of the config."""
