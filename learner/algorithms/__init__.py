"""The math of the learner as pure functions: advantages, losses, methods."""
