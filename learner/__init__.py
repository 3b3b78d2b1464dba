"""Processes that learn: buffer, trainer, weight publisher; `algorithms/` holds all the math."""

if __name__ != "seed_async.learner":
    raise ImportError("import this package as seed_async.learner: its bare name collides with other distributions")
