"""What a stage may not ask of a teacher with another tokenizer."""

from lmgym.config.schema import Stage
from lmgym.core.errors import LmgymError
from lmgym.models.model_info import ModelInfo
from lmgym.text.token_bytes import token_bytes
from lmgym.text.token_pairs import end_pairs


def check_other_tokenizer(stage: Stage, name: str, policy: ModelInfo, teacher: ModelInfo) -> None:
    """Raise LmgymError, with the teacher's `name`, where its tokens cannot be compared with the policy's."""
    algorithm, required, sampling = stage.algorithm, stage.algorithm.requirements, stage.sampling
    own = "take a teacher with the policy's tokenizer"
    refused = [
        (policy.encoder_decoder, f"only causal models are compared by pieces of text; {own}"),
        (required.divergence is None, f"this algorithm compares single tokens; write algorithm.name: gkd, or {own}"),
        (
            not stage.source.samples or required.given_share > 0,
            "pieces of several tokens are compared by what the policy has sampled, not by references; write source: "
            f"student and student_share: 1.0, or {own}",
        ),
        (
            algorithm.optimizer_steps > 1,
            "pieces of several tokens have no ratio to correct them for a second optimizer step; set epochs and "
            "minibatches to 1",
        ),
        (
            stage.is_played,
            f"it reads one prompt and one answer, where environment '{stage.env.get('name')}' makes conversations; "
            f"remove env, or {own}",
        ),
        (
            stage.task.get("prompts") == "rendered",
            "it would not know the marks of the policy's template in task.prompts: rendered; write prompts: chat",
        ),
        (
            sampling.truncates or sampling.min_new_tokens > 0,
            "sampling.top_k, top_p, min_p and min_new_tokens exclude tokens of the policy's vocabulary, which is not "
            f"the teacher's; leave them out, or {own}",
        ),
    ]
    for holds, reason in refused:
        if holds:
            raise LmgymError(f"algorithm.teacher: {name} has another tokenizer than the policy, and {reason}")
    token_bytes(policy.tokenizer, "policy.model")
    token_bytes(teacher.tokenizer, f"algorithm.teacher: {name}")
    end_pairs(policy.tokenizer, teacher.tokenizer, name)
