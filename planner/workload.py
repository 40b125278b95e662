"""Rules of thumb on the optimizer for the effective batch: published fits and practice, guides and no laws."""

from __future__ import annotations

from dataclasses import dataclass

from planner.catalogue.schema import Model
from planner.cost import flops
from planner.scenario import Scenario

FIT_SEQUENCE = 2048
"""Tokens of a sequence in the fits of Bergsma et al. 2025."""

USUAL_CRITICAL_TOKENS = 10e6
"""Taken for the critical batch where the training tokens are not known: the guide's of some 70 billion of them."""

WARM_UP_SHARES = (0.001, 0.01)
"""Of the steps. Published: 8,000 of about 1.2 million (Llama 3 405B), 2,000 (DeepSeek-V3)."""
WARM_UP_TOKENS = 375e6
"""Of GPT-3 and BLOOM, whose warm-up is stated in tokens."""

GRADIENT_NORM = 1.0
"""To which the global gradient is clipped. Source: GPT-3, BLOOM and DeepSeek-V3 alike."""

BASE_BATCH_TOKENS = 1 << 22
"""The batch, about 4.2 million tokens, from whose learning rate the rule scales: that of Llama 1 and 2."""


def critical_batch_tokens(training_tokens: float) -> float:
    """Tokens per step from which a larger batch saves hardly any steps: 0.0471 D^0.462 sequences of 2,048, D the training tokens.

    It grows with the data and hardly with the model (Zhang et al. 2024, arXiv 2410.21676).
    Source: Bergsma et al. 2025 (Power Lines, arXiv 2505.13738), fitted on small models.

    >>> round(critical_batch_tokens(1e12) / 1e6, 1)
    33.8
    """
    return float(0.0471 * training_tokens**0.462 * FIT_SEQUENCE)


def optimal_batch_tokens(training_tokens: float) -> float:
    """Tokens per step that reach the lowest loss with so many training tokens: 0.0306 D^0.383 sequences of 2,048.

    Source: Bergsma et al. 2025 (Power Lines, arXiv 2505.13738), fitted on small models.

    >>> round(optimal_batch_tokens(1e12) / 1e6, 2)
    2.47
    """
    return float(0.0306 * training_tokens**0.383 * FIT_SEQUENCE)


def compute_optimal_batch_tokens(training_flops: float) -> float:
    """Tokens per step that a fit on the compute C calls optimal: 0.2920 C^0.3271.

    Source: DeepSeek LLM (arXiv 2401.02954, section 3.1), fitted at 1e17 to 2e19 FLOPs, checked at 1e20.

    >>> round(compute_optimal_batch_tokens(1e20) / 1e6, 2)
    1.02
    """
    return float(0.2920 * training_flops**0.3271)


def peak_learning_rate(training_flops: float) -> float:
    """Adam's peak learning rate that the same fit calls optimal: 0.3118 C^-0.1250.

    Source: DeepSeek LLM (arXiv 2401.02954, section 3.1), fitted at 1e17 to 2e19 FLOPs, checked at 1e20.

    >>> round(peak_learning_rate(1e24), 6)
    0.000312
    """
    return float(0.3118 * training_flops**-0.1250)


def extra_tokens(batch_tokens: float, critical_tokens: float) -> float:
    """Share of tokens that a loss takes beyond those of a very small batch: E = E_min (1 + B / B_crit), so B / B_crit.

    Source: McCandlish et al. 2018 (arXiv 1812.06162); the steps are S_min (1 + B_crit / B).

    >>> extra_tokens(10e6, 40e6)
    0.25
    """
    return batch_tokens / critical_tokens


def non_embedding_flops_per_token(model: Model, seq_len: int) -> float:
    """FLOPs per token without embedding and output head: DeepSeek LLM's M, 72 L h^2 + 12 L h s for a GPT's shape.

    The model FLOPs of an MFU less the head's 6 V h; of experts the active ones, though the fits saw dense models only.

    >>> from planner.catalogue.load import find
    >>> gpt = find(Model, "gpt-3-175b")
    >>> round(non_embedding_flops_per_token(gpt, 2048) / (72 * 96 * 12288**2 + 12 * 96 * 12288 * 2048), 3)
    1.0
    """
    return flops.model_flops_per_token(model, seq_len) - 6.0 * model.vocab_size * model.hidden_size


def training_flops(scenario: Scenario) -> float:
    """The compute C of the fits: non-embedding FLOPs per token x training tokens."""
    job = scenario.job
    return non_embedding_flops_per_token(job.model, job.seq_len) * scenario.training_tokens


def critical_tokens(scenario: Scenario) -> float:
    """Tokens per step beyond which the checklist calls a batch large."""
    return critical_batch_tokens(scenario.training_tokens) if scenario.training_tokens else USUAL_CRITICAL_TOKENS


@dataclass(frozen=True, kw_only=True)
class BatchGuide:
    """A batch beside what the guides say of it; all in tokens per step."""

    batch_tokens: int
    optimal_tokens: float
    """By the training tokens."""
    compute_optimal_tokens: float
    """By the compute."""
    critical_tokens: float

    @property
    def extra_tokens(self) -> float:
        """Share of tokens that the same loss takes beyond those of a very small batch."""
        return extra_tokens(self.batch_tokens, self.critical_tokens)

    @property
    def place(self) -> str:
        """Where the batch lies, as the end of a sentence."""
        if self.batch_tokens > self.critical_tokens:
            return "beyond the critical"
        return "below the optimal" if self.batch_tokens < self.optimal_tokens else "between the optimal and the critical"


def batch_guide(scenario: Scenario) -> BatchGuide | None:
    """The scenario's batch beside the guides; None without training tokens."""
    if not scenario.training_tokens:
        return None
    return BatchGuide(
        batch_tokens=scenario.job.tokens_per_step,
        optimal_tokens=optimal_batch_tokens(scenario.training_tokens),
        compute_optimal_tokens=compute_optimal_batch_tokens(training_flops(scenario)),
        critical_tokens=critical_batch_tokens(scenario.training_tokens),
    )


@dataclass(frozen=True)
class RateRule:
    """How an optimizer's learning rate grows with the batch."""

    exponent: float
    """Of the ratio of the batches."""
    words: str
    grounds: str
    """The optimizer and who says so."""
    fitted: bool = False
    """Whether the absolute rate of :func:`peak_learning_rate` is of this optimizer."""


RATE_RULES: dict[str, RateRule] = {
    "adam": RateRule(0.5, "sqrt(batch ratio)", "Adam; Malladi et al. 2022", fitted=True),
    "adam-8bit": RateRule(0.5, "sqrt(batch ratio)", "Adam; Malladi et al. 2022", fitted=True),
    "muon": RateRule(0.5, "sqrt(batch ratio)", "Adam's rule; none is established for Muon"),
    "sgd-momentum": RateRule(1.0, "batch ratio", "SGD; Goyal et al. 2017"),
}
"""By the optimizers of a workload. Source: Malladi et al. 2022 (arXiv 2205.10287), Goyal et al. 2017 (arXiv 1706.02677)."""


@dataclass(frozen=True)
class LearningRate:
    """What the guides say of the learning rate."""

    rule: RateRule
    factor: float
    """By which the rate of a run at :data:`BASE_BATCH_TOKENS` changes for the scenario's batch."""
    peak: float | None
    """Of the fit; None without training tokens, or for an optimizer that was not fitted."""


def learning_rate(scenario: Scenario) -> LearningRate:
    """The rule of the scenario's optimizer, and the fit's rate where there is one."""
    rule = RATE_RULES[scenario.job.optimizer]
    factor = (scenario.job.tokens_per_step / BASE_BATCH_TOKENS) ** rule.exponent
    known = rule.fitted and scenario.training_tokens > 0
    return LearningRate(rule, factor, peak_learning_rate(training_flops(scenario)) if known else None)


def warm_up_steps(scenario: Scenario) -> tuple[float, float] | None:
    """From how many steps to how many the learning rate rises; None without training tokens."""
    steps = scenario.training_tokens / scenario.job.tokens_per_step
    least, most = WARM_UP_SHARES
    return (least * steps, most * steps) if steps else None
