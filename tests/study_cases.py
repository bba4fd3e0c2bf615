"""The environment of synthetic studies."""

from esbench.schema import Environment

HERE = Environment(
    device="cpu",
    device_name="Some CPU",
    cpu="Some CPU",
    threads=2,
    memory_bytes=1,
    platform="p",
    python="3.11",
    torch="2.13",
    esbench="0.1",
    load=0.5,
)
