"""all_reduce of Yunta and of MLX's ring backend over loopback, in turn, in one run.

    pip install 'mlx[cpu]==0.32.4'
    python benches/collectives/compare.py target/release/yunta

Prints per world size and message size the medians over the trials, and the ratios.
"""

import json
import pathlib
import statistics
import subprocess
import sys

SIZES = [4096, 16384, 65536, 67108864]
TRIALS = 5
PORT = 40123


def mlx(ranks, port):
    launch = pathlib.Path(sys.executable).parent / "mlx.launch"
    script = pathlib.Path(__file__).with_name("mlx_ring.py")
    command = [launch, "-n", ranks, "--backend", "ring", "--starting-port", port]
    command += ["--python", sys.executable, script, ",".join(map(str, SIZES))]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    lines = [l for l in done.stdout.splitlines() if l.startswith("{")]
    if not lines:
        sys.exit(done.stdout + done.stderr)
    return {r["bytes"]: r["median_us"] for r in map(json.loads, lines)}


def yunta(program, ranks, transport):
    command = [program, "comm-bench", "--ranks", ranks, "--transport", transport, "--json"]
    command += ["--no-preflight", "--sizes", ",".join(map(str, SIZES))]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return {r["bytes"]: r["median_us"] for r in json.loads(done.stdout)["results"]}


def main():
    program = sys.argv[1]
    print(f"{'ranks':>5} {'bytes':>9} {'mlx us':>10} {'tcp us':>10} {'ratio':>7} {'shm us':>10} {'ratio':>7}")
    for ranks in (2, 4):
        found = {"mlx": [], "tcp": [], "shm": []}
        for trial in range(TRIALS):
            found["mlx"].append(mlx(ranks, PORT + 10 * trial))
            found["tcp"].append(yunta(program, ranks, "tcp"))
            found["shm"].append(yunta(program, ranks, "shm"))
        for size in SIZES:
            m, t, s = (statistics.median(r[size] for r in found[k]) for k in ("mlx", "tcp", "shm"))
            print(f"{ranks:>5} {size:>9} {m:>10.1f} {t:>10.1f} {m / t:>7.1f} {s:>10.1f} {m / s:>7.1f}")


main()
