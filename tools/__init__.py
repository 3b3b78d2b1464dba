"""What an operator or developer runs beside the system: benchmarks, plots, data makers."""

if __name__ != "seed_async.tools":
    raise ImportError("import this package as seed_async.tools: its bare name collides with other distributions")
