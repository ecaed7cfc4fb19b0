"""The serving engine: scheduler, jitted steps, sampling, streaming."""
