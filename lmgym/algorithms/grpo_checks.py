"""Which fields of GRPO do not go together: where one would leave another unread, or count something twice."""

from lmgym.algorithms.grpo_fields import GRPOFields
from lmgym.core.errors import LmgymError


def check_together(fields: GRPOFields) -> None:
    """Raise LmgymError with one sentence that names the two and what would be right."""
    _check_trust_region(fields)
    _check_importance(fields)
    _check_credit(fields)
    _check_selection(fields)


def _check_trust_region(fields: GRPOFields) -> None:
    if fields.dual_clip is not None and fields.objective != "clip":
        raise LmgymError(f"algorithm.dual_clip belongs to objective: clip, and objective is {fields.objective}")
    if fields.objective in ("dppo", "ipo") and fields.ratio != "token":
        raise LmgymError(
            f"algorithm.ratio is {fields.ratio}, and objective {fields.objective} looks at single tokens; write token"
        )
    if fields.objective in ("gmpo", "vespo") and fields.ratio != "token":
        raise LmgymError(
            f"algorithm.ratio is {fields.ratio}, and objective {fields.objective} makes a ratio of the row by itself; "
            "write token"
        )
    own_credit = "baseline: token" if fields.baseline == "token" else "turn_coefficient"
    if fields.objective == "gmpo" and (fields.baseline == "token" or fields.turn_coefficient):
        raise LmgymError(
            f"algorithm.{own_credit} gives the tokens of a row advantages of their own, and objective gmpo has one "
            "ratio for a row with one advantage; write objective: clip, or leave it out"
        )
    if fields.ratio == "sequence" and (fields.baseline == "token" or fields.turn_coefficient or fields.top_entropy < 1):
        own_credit = "top_entropy" if fields.top_entropy < 1 else own_credit
        raise LmgymError(
            f"algorithm.{own_credit} gives the tokens of a row advantages of their own, and with ratio: sequence each "
            "token gets the gradient of all of them; write ratio: sequence_token, which has the same values"
        )
    if fields.length_norm and fields.reduction != "constant":
        raise LmgymError(
            f"algorithm.length_norm goes with reduction: constant, and reduction is {fields.reduction}; the others "
            "divide by lengths already"
        )


def _check_importance(fields: GRPOFields) -> None:
    low, high = fields.importance_floor, fields.importance_cap
    key = "importance_floor" if high is None else "importance_cap"
    if fields.bounds_importance and fields.ratio_to == "sampler":
        raise LmgymError(
            f"algorithm.{key} and ratio_to: sampler correct for the same difference; leave one of them out"
        )
    if fields.bounds_importance and fields.objective == "vespo":
        raise LmgymError(
            f"algorithm.{key} weighs tokens, and objective vespo weighs whole rows by itself; write ratio_to: sampler "
            "in its place"
        )
    if not fields.bounds_importance and (fields.importance_outside == "mask" or fields.importance_level == "sequence"):
        key = "importance_outside" if fields.importance_outside == "mask" else "importance_level"
        raise LmgymError(
            f"algorithm.{key} is about a weight that nothing bounds; set importance_cap, importance_floor or both"
        )
    if low is not None and high is not None and low > high:
        raise LmgymError(
            f"algorithm.importance_floor is {low} and algorithm.importance_cap {high}; the first must not be the "
            "larger one"
        )


def _check_credit(fields: GRPOFields) -> None:
    if fields.normalise_parts and fields.scale_rewards != "none":
        raise LmgymError("algorithm.normalise_parts scales by itself; set scale_rewards to none")
    if fields.normalise_parts and fields.kl_coefficient and fields.kl_in == "reward":
        raise LmgymError(
            "algorithm.normalise_parts scales every reward, so a KL penalty in the reward would lose its "
            "coefficient; write kl_in: loss"
        )
    ways = {
        "normalise_parts": fields.normalise_parts,
        "pass_at": fields.pass_at is not None,
        "scale_rewards: mean": fields.scale_rewards == "mean",
        f"baseline: {fields.baseline}": fields.baseline != "mean",
        "keep": fields.keep is not None,
    }
    chosen = [name for name, used in ways.items() if used]
    if len(chosen) > 1:
        raise LmgymError(f"algorithm.{chosen[0]} and {chosen[1]} make advantages in two ways; leave one of them out")
    if chosen and chosen[0] in ("pass_at", "baseline: length", "baseline: token") and fields.scale_rewards != "none":
        raise LmgymError(
            f"algorithm.{chosen[0]} has a scale of its own, and scale_rewards is {fields.scale_rewards}; write none"
        )
    if chosen and chosen[0] in ("normalise_parts", "pass_at", "scale_rewards: mean") and fields.scale_by_mixed:
        raise LmgymError(f"algorithm.scale_by_mixed and {chosen[0]} scale the same advantages; leave one of them out")
    if fields.normalise_parts and fields.overlong:
        raise LmgymError(
            "algorithm.normalise_parts reads the rewards one by one, and overlong changes their sum; take the reward "
            "overlong in its place"
        )
    if fields.scale_rewards == "mean" and (fields.overlong or (fields.kl_coefficient and fields.kl_in == "reward")):
        key = "overlong" if fields.overlong else "kl_in"
        raise LmgymError(
            f"algorithm.scale_rewards is mean, which needs scores of 0 or more, and {key} makes some negative; write "
            f"{'overlong: 0' if fields.overlong else 'kl_in: loss'}"
        )
    if fields.turn_coefficient and fields.scale_rewards not in ("none", "group"):
        raise LmgymError(
            f"algorithm.turn_coefficient compares turns of a group, and scale_rewards is {fields.scale_rewards}; write "
            "none or group"
        )
    if fields.turn_coefficient and fields.kl_coefficient and fields.kl_in == "reward":
        raise LmgymError(
            "algorithm.turn_coefficient reads the rewards of the turns, which a KL penalty in the reward does not "
            "change; write kl_in: loss"
        )
    if not fields.turn_coefficient and (fields.turn_history or fields.episode_coefficient != 1):
        key = "turn_history" if fields.turn_history else "episode_coefficient"
        raise LmgymError(f"algorithm.{key} is about the advantages of turns; set turn_coefficient above 0")
    for name, most in (("pass_at", fields.group_size), ("keep", fields.group_size - 1)):
        value = getattr(fields, name)
        if value is not None and value > most:
            raise LmgymError(
                f"algorithm.{name} is {value}, and algorithm.group_size is {fields.group_size}; write {most} or less"
            )


def _check_selection(fields: GRPOFields) -> None:
    if fields.covariance == "none":
        return
    if fields.top_entropy < 1:
        raise LmgymError("algorithm.top_entropy and covariance choose tokens in two ways; leave one of them out")
    if fields.covariance == "clip" and (fields.objective != "clip" or fields.ratio != "token"):
        raise LmgymError(
            "algorithm.covariance: clip chooses among the tokens that the clip has left; write objective: clip and "
            "ratio: token"
        )
    if fields.covariance == "clip" and fields.covariance_low >= fields.covariance_high:
        raise LmgymError(
            f"algorithm.covariance_low is {fields.covariance_low} and algorithm.covariance_high "
            f"{fields.covariance_high}; the first must be the smaller one"
        )
