"""A trainer beside the engine that it trains for: examples/colocated.yaml runs this.

Step by step: take the engine's memory, train, give the memory for the weights back, send them, give
the rest back. Then it parks: while it lives, an engine that restarts gets its weights again.
"""

import json
import os
import signal
import threading
import uuid
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollout_client.trainer import ReplicaTarget, Superseded, SyncServerAdapter

MODEL = Path(os.environ.get("TRAINER_MODEL", "/checkpoints/base"))
STEPS = int(os.environ.get("TRAINER_STEPS", "2"))
PROMPT = [301, 302, 303, 304]


def train(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """One step of language modelling; a policy-gradient step has the same shape."""
    optimizer.zero_grad()
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def continued(model: PreTrainedModel, count: int) -> list[int]:
    """What the model says after ``PROMPT``, the likeliest token each time."""
    with torch.no_grad():
        tokens = torch.tensor([PROMPT])
        for _ in range(count):
            best = model(input_ids=tokens).logits[0, -1].argmax()
            tokens = torch.cat([tokens, best.reshape(1, 1)], dim=1)
    return tokens[0, len(PROMPT) :].tolist()


def main() -> None:
    """Train, and park."""
    # kubelet stops a container by a signal; nothing here may outlive it
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randint(3, model.config.vocab_size, (4, 32))
    run = uuid.uuid4().hex[:6]  # a name stands for one set of bytes, also when this begins anew
    with SyncServerAdapter(ReplicaTarget.here(), timeout_s=300) as adapter:
        for step in range(1, STEPS + 1):
            adapter.release()
            loss = train(model, optimizer, batch)
            adapter.resume(("weights",))
            try:
                results = adapter.update_weights(
                    model.state_dict(), global_steps=step, version=f"run-{run}-{step}"
                )
            except Superseded as error:
                print(json.dumps({"superseded": str(error)}), flush=True)
                break
            adapter.resume()  # the KV cache too: it generates
            (result,) = results.values()
            told = {"version": result.weight_version, "loss": loss, "seconds": result.seconds}
            if result.sent is not None:
                told |= {"bytes": result.sent.bytes, "transport": result.sent.transport}
            print(json.dumps(told | {"says": continued(model, 16)}), flush=True)
        print(json.dumps({"parked": True}), flush=True)
        stopped.wait()


if __name__ == "__main__":
    main()
