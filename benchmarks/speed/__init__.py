"""The published speed tables: engine, learner and a whole step, each beside an alternative."""
