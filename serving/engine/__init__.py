"""One model on one slice: sequences, planner, jitted step, and the thread that owns them."""
