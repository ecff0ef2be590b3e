#!/usr/bin/env python3
"""Load on OpenAI-compatible servers: throughput, time to first token, time between tokens.

Only the standard library is needed. Prompts are token ids drawn at random (a seed each, so that no
prefix cache knows them) and outputs have a fixed length, so that every server does the same work.

    load.py run --url http://127.0.0.1:8080 --clients 8 --prompt 256 --output 64 --requests 32
    load.py run --url ... --rate 2 ...          open loop: so many requests per second (Poisson)
    load.py stall --url ... --clients 8 --prompt 4096
                                                streams that run when a long prompt arrives
    load.py compare --server 'yunta=target/release/yunta serve M.gguf --port {port}' \\
                    --server 'llama=llama-server -m M.gguf --port {port} -np {slots} -c {context}' \\
                    --clients 1,8,32 --mix 256x64,64x256,1024x32 --rounds 3
"""

import argparse
import asyncio
import json
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request


async def request(address, body, result):
    """Sends one streamed completion; fills in when each piece came."""
    host, port = address
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps(body).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n")
    writer.write(head.encode() + data)
    times = []
    status = (await reader.readline()).decode()
    if " 200 " not in status:
        result["error"] = status.strip()
        writer.close()
        return
    while line := await reader.readline():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            result["error"] = str(event["error"])
            break
        if event.get("usage"):
            result["output"] = event["usage"]["completion_tokens"]
            result["prompt"] = event["usage"]["prompt_tokens"]
        if event.get("choices"):
            times.append(time.perf_counter())
    writer.close()
    result["times"] = times
    # A server may send a last piece without text: it comes with the token before it.
    result["ttft"] = times[0] - start if times else None
    result["gaps"] = [b - a for a, b in zip(times, times[1:]) if b - a > 1e-4]
    result["end"] = time.perf_counter()


def body_of(args, number):
    chance = random.Random(args.seed * 1_000_003 + number)
    prompt = [chance.randrange(100, args.vocab) for _ in range(args.prompt)]
    return {"model": args.model, "prompt": prompt, "max_tokens": args.output, "stream": True,
            "temperature": args.temperature, "seed": number, "ignore_eos": True,
            "cache_prompt": True, "stream_options": {"include_usage": True}}


async def load(args):
    """Closed loop with so many clients, or open loop at a rate."""
    host, port = args.url.removeprefix("http://").split(":")
    address = (host, int(port))
    results = [{} for _ in range(args.requests)]
    numbers = iter(range(args.requests))

    async def client():
        for number in numbers:
            await request(address, body_of(args, number), results[number])

    start = time.perf_counter()
    if args.rate:
        tasks, chance = [], random.Random(args.seed)
        for number in numbers:
            tasks.append(asyncio.create_task(request(address, body_of(args, number), results[number])))
            await asyncio.sleep(chance.expovariate(args.rate))
        await asyncio.gather(*tasks)
    else:
        await asyncio.gather(*[client() for _ in range(args.clients)])
    return summary(results, time.perf_counter() - start)


async def stall(args):
    """How much slower streams get while a long prompt is computed: stream by stream."""
    host, port = args.url.removeprefix("http://").split(":")
    address, streams = (host, int(port)), [{} for _ in range(args.clients)]
    short = argparse.Namespace(**{**vars(args), "prompt": 64, "output": args.output})
    running = [asyncio.create_task(request(address, body_of(short, i), r)) for i, r in enumerate(streams)]
    await asyncio.sleep(args.after)
    arrival, prompt = time.perf_counter(), {}
    long = argparse.Namespace(**{**vars(args), "output": 1})
    await request(address, body_of(long, args.clients), prompt)
    await asyncio.gather(*running)
    first = arrival + prompt["ttft"]
    ratios, before, during, after = [], [], [], []
    for stream in streams:
        gaps = list(zip(stream["times"], stream["times"][1:]))
        # The streams' own prompts are still being computed at first.
        alone = [b - a for a, b in gaps if arrival - args.after / 2 < a and b < arrival]
        beside = [b - a for a, b in gaps if arrival <= a and b <= first]
        # Contexts grow meanwhile: what a stream takes by itself is between before and after.
        again = [b - a for a, b in gaps if first < a][:len(alone)]
        if not alone or not beside or not again:
            sys.exit("a stream ended too early: ask for more --output")
        before, during, after = before + alone, during + beside, after + again
        mean = statistics.mean
        ratios.append(mean(beside) / (mean(alone) / 2 + mean(again) / 2))
    ms = lambda x: round(1e3 * x, 1)
    return {"ttft_ms": ms(prompt["ttft"]), "ratio_worst": round(max(ratios), 2),
            "before_p50_ms": ms(percentile(before, 50)), "before_p99_ms": ms(percentile(before, 99)),
            "during_p50_ms": ms(percentile(during, 50)), "during_p99_ms": ms(percentile(during, 99)),
            "after_p50_ms": ms(percentile(after, 50)), "after_p99_ms": ms(percentile(after, 99))}


def percentile(values, p):
    if not values:
        return None
    values = sorted(values)
    return values[min(len(values) - 1, int(p / 100 * len(values)))]


def summary(results, seconds):
    good = [r for r in results if "error" not in r and r.get("ttft") is not None]
    gaps = [g for r in good for g in r["gaps"]]
    ttft = [r["ttft"] for r in good]
    ms = lambda x: None if x is None else round(1e3 * x, 1)
    return {
        "output_tps": round(sum(r.get("output", 0) for r in good) / seconds, 1),
        "total_tps": round(sum(r.get("output", 0) + r.get("prompt", 0) for r in good) / seconds, 1),
        "ttft_p50_ms": ms(percentile(ttft, 50)), "ttft_p99_ms": ms(percentile(ttft, 99)),
        "gap_p50_ms": ms(percentile(gaps, 50)), "gap_p99_ms": ms(percentile(gaps, 99)),
        "requests": len(good), "errors": len(results) - len(good), "seconds": round(seconds, 2),
    }


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, clients, context):
    """Starts a server; returns it with its address when it is ready."""
    port = free_port()
    words = shlex.split(command.format(port=port, slots=clients, context=clients * context))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    for _ in range(600):
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return process, url
        except OSError:
            pass
        if process.poll() is not None:
            sys.exit(f"{words[0]} ended with {process.returncode}")
        time.sleep(0.1)
    sys.exit(f"{words[0]} is not ready after a minute")


def stop(process):
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def compare(args):
    """Every server under every load, in turn; medians of the rounds."""
    servers = dict(s.split("=", 1) for s in args.server)
    names = list(servers)
    print(f"| clients | prompt x output | server | output tok/s | all tok/s | TTFT p50/p99 ms "
          f"| gap p50/p99 ms | ratio |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for mix in args.mix.split(","):
        args.prompt, args.output = map(int, mix.split("x"))
        for clients in map(int, args.clients.split(",")):
            args.clients_now, runs = clients, {n: [] for n in names}
            args.requests = max(args.least, clients * args.per_client)
            for number in range(args.rounds):
                for name in names:
                    context = args.prompt + args.output + 64
                    process, args.url = start(servers[name], clients, context)
                    try:
                        now = argparse.Namespace(**{**vars(args), "clients": clients})
                        now.seed = args.seed + number
                        asyncio.run(load(argparse.Namespace(**{**vars(now), "requests": 1, "seed": 999})))
                        runs[name].append(asyncio.run(load(now)))
                    finally:
                        stop(process)
            show(names, runs, clients, mix)


def show(names, runs, clients, mix):
    def median(name, key):
        values = [r[key] for r in runs[name] if r[key] is not None]
        return statistics.median(values) if values else float("nan")

    for name in names:
        ratio = median(names[0], "total_tps") / median(name, "total_tps")
        errors = sum(r["errors"] for r in runs[name])
        print(f"| {clients} | {mix} | {name}{f' ({errors} errors)' if errors else ''} "
              f"| {median(name, 'output_tps'):.1f} | {median(name, 'total_tps'):.1f} "
              f"| {median(name, 'ttft_p50_ms'):.0f} / {median(name, 'ttft_p99_ms'):.0f} "
              f"| {median(name, 'gap_p50_ms'):.1f} / {median(name, 'gap_p99_ms'):.1f} "
              f"| {ratio:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one, several, beside = map(commands.add_parser, ["run", "compare", "stall"])
    for p in (one, several, beside):
        p.add_argument("--model", default=None, help="name to send; servers of one model need none")
        p.add_argument("--vocab", type=int, default=49152, help="token ids are below this")
        p.add_argument("--temperature", type=float, default=0.8)
        p.add_argument("--seed", type=int, default=1)
        p.add_argument("--rate", type=float, help="open loop: requests per second")
    one.add_argument("--url", required=True)
    one.add_argument("--clients", type=int, default=1)
    one.add_argument("--prompt", type=int, default=256)
    one.add_argument("--output", type=int, default=64)
    one.add_argument("--requests", type=int, default=16)
    one.set_defaults(run=lambda args: print(json.dumps(asyncio.run(load(args)))))
    beside.add_argument("--url", required=True)
    beside.add_argument("--clients", type=int, default=8, help="streams")
    beside.add_argument("--prompt", type=int, default=4096, help="tokens of the prompt that arrives")
    beside.add_argument("--output", type=int, default=1500, help="tokens of each stream")
    beside.add_argument("--after", type=float, default=4, help="seconds until it arrives")
    beside.set_defaults(run=lambda args: print(json.dumps(asyncio.run(stall(args)))))
    several.add_argument("--server", action="append", required=True, help="NAME=COMMAND")
    several.add_argument("--clients", default="1,8,32")
    several.add_argument("--mix", default="256x64", help="prompt x output tokens, several by commas")
    several.add_argument("--rounds", type=int, default=3)
    several.add_argument("--per-client", type=int, default=2)
    several.add_argument("--least", type=int, default=6, help="requests per run, at least")
    several.set_defaults(run=compare)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
