"""The demo's proof: what the callers hold, against Hugging Face and the pod's own count."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rollout_client import Rollout

LOG_PROB_TOLERANCE = 1e-3
TIE_TOLERANCE = 1e-4
"""Two logits as close as this may come out in either order from two programs in float32."""


@dataclass
class Proof:
    """Tokens compared, and how far the two engines were apart."""

    tokens: int = 0
    greedy: int = 0
    """Exactly the reference's first choice."""
    ties: int = 0
    """Not its first choice, but as likely as that within TIE_TOLERANCE."""
    wrong: int = 0
    worst_log_prob: float = 0.0

    @property
    def holds(self) -> bool:
        """Every token is the greedy choice of the version that its span names."""
        return not self.wrong and self.worst_log_prob <= LOG_PROB_TOLERANCE and self.tokens > 0


def compare(
    rollouts: Iterable[tuple[Sequence[int], Rollout]], checkpoints: Mapping[str, Path]
) -> Proof:
    """Compare each token and log-prob with the version's checkpoint in float32.

    The reference reads the whole rollout at once: a token is right when it is the most likely one
    after all tokens before it. For a rollout of one version that equals greedy generation.

    Args:
        rollouts: Prompts with their greedy rollouts.
        checkpoints: The folder of each version.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    proof = Proof()
    pairs = list(rollouts)
    versions = {span.version for _, rollout in pairs for span in rollout.weight_versions}
    for version in sorted(versions):
        model = AutoModelForCausalLM.from_pretrained(checkpoints[version], dtype=torch.float32)
        model.eval()
        for prompt, rollout in pairs:
            spans = [span for span in rollout.weight_versions if span.version == version]
            if not spans:
                continue
            ids = torch.tensor([[*prompt, *rollout.token_ids]])
            with torch.inference_mode():
                logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
            for span in spans:
                there = slice(span.start, span.end)
                _add(proof, logits[there], rollout.token_ids[there], rollout.log_probs[there])
    return proof


def _add(proof: Proof, logits: object, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
    import torch

    scores = torch.as_tensor(logits)
    chosen = torch.tensor(tokens).unsqueeze(1)
    behind = scores.max(dim=-1).values - scores.gather(1, chosen).squeeze(1)
    expected = torch.log_softmax(scores, dim=-1).gather(1, chosen).squeeze(1)
    apart = (expected - torch.tensor(log_probs)).abs().max().item()
    exact = int((behind == 0).sum())
    near = int(((behind > 0) & (behind <= TIE_TOLERANCE)).sum())
    proof.tokens += len(tokens)
    proof.greedy += exact
    proof.ties += near
    proof.wrong += len(tokens) - exact - near
    proof.worst_log_prob = max(proof.worst_log_prob, apart)


def returned_tokens(metrics: str) -> int:
    """Tokens that the pod has returned to its callers, by its own ``/metrics``."""
    from prometheus_client.parser import text_string_to_metric_families

    return int(
        sum(
            sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
            if sample.name == "rollout_generated_tokens_total"
        )
    )
