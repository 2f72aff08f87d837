"""Train a small model and keep an engine's weights up to date by differences, through a folder.

Run `python examples/weight_updates.py FOLDER`. The engine is a process of its own. It stages each
update while it goes on serving, and commits it between two requests.
"""

import argparse
import multiprocessing
import time

import torch

from packhorse.wire.updates import DeltaReceiver, DeltaSender, UpdateFolder


def make_model(seed: int = 0) -> torch.nn.Module:
    """The model on both sides: bf16, as it is served."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    return torch.nn.Sequential(*layers).bfloat16()


def serve(url: str, last: int) -> None:
    """The engine: begins with weights of its own, and follows the folder."""
    model, folder = make_model(seed=1), UpdateFolder(url)
    receiver = DeltaReceiver(into=model)
    while receiver.version != last:
        staged = folder.stage_newest(receiver)  # the engine goes on meanwhile
        if staged is None:
            time.sleep(0.01)
            continue
        begin = time.perf_counter()
        receiver.commit(staged)  # the pause
        pause = 1e3 * (time.perf_counter() - begin)
        answer = model(torch.ones(256, dtype=torch.bfloat16)).sum().item()
        print(f"version {receiver.version}: pause {pause:.1f} ms, answer {answer:.4f}", flush=True)


def main(args: argparse.Namespace) -> None:
    """The trainer: publishes a version after each step."""
    engine = multiprocessing.get_context("spawn").Process(target=serve, args=(args.url, args.steps))
    engine.start()
    model, folder = make_model(), UpdateFolder(args.url)
    sender = DeltaSender(model)
    for _ in range(args.steps):
        for weight in model.parameters():  # a stand-in for a training step
            weight.data += 1e-5 * torch.randn_like(weight)
        folder.publish(update := sender.pack())
        print(update, flush=True)
    engine.join()
    answer = model(torch.ones(256, dtype=torch.bfloat16)).sum().item()
    print(f"the trainer's answer: {answer:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="folder, or URL such as s3://bucket/updates")
    parser.add_argument("--steps", type=int, default=8)
    main(parser.parse_args())
