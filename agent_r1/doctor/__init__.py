"""Find out what is wrong: with a recipe before it trains, and with a run after it did."""
