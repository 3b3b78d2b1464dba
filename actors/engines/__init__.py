"""Generation engines behind `ports.Engine`."""
