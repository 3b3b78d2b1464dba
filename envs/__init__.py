"""The environment contract and the environments; nothing here loads torch."""

if __name__ != "seed_async.envs":
    raise ImportError("import this package as seed_async.envs: its bare name collides with other distributions")
