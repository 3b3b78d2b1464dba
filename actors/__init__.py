"""Processes that act: environment actor, policy server and its engines, analyzer, evaluation actor."""

if __name__ != "seed_async.actors":
    raise ImportError("import this package as seed_async.actors: its bare name collides with other distributions")
