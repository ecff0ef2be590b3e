"""Times mx.distributed.all_sum on the ring backend: one JSON line per size, from rank 0.

Started by compare.py through mlx.launch.
"""

import json
import statistics
import sys
import time

import mlx.core as mx

group = mx.distributed.init(strict=True, backend="ring")
for size in map(int, sys.argv[1].split(",")):
    rounds = 1000 if size <= 65536 else 5
    if group.size() > 2 and size <= 65536:
        rounds = 60
    data = mx.ones(size // 4, dtype=mx.float32)
    mx.eval(data)
    times = []
    for _ in range(rounds + 5):
        start = time.perf_counter()
        mx.eval(mx.distributed.all_sum(data, group=group))
        times.append((time.perf_counter() - start) * 1e6)
    if group.rank() == 0:
        print(json.dumps({"bytes": size, "median_us": statistics.median(times[5:])}), flush=True)
