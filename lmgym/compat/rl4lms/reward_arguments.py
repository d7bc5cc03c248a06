"""Convert the arguments of RL4LMs' reward functions and metrics, id by id.

Each function reads the arguments of one id and returns {name: arguments} of lmgym's rewards (docs/rl4lms.md)."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lmgym.compat.rl4lms.schema import Conversion, Section
from lmgym.core import registry
from lmgym.core.errors import LmgymError

Named = dict[str, dict[str, Any]]  # a reward's name -> its arguments
Reader = Callable[[Section, Conversion], Named]
BERTS = {"en": ("roberta-large", 17), "zh": ("bert-base-chinese", 8), "en-sci": ("allenai/scibert_scivocab_uncased", 8)}
MULTILINGUAL = ("bert-base-multilingual-cased", 9)  # as the package bert-score chooses for all other languages
INTENTS = "rajkumarrrk/roberta-daily-dialog-intent-classifier"
ENTAILMENT = "tals/albert-xlarge-vitaminc-mnli"
ROUGES = ("rouge1", "rouge2", "rougeL", "rougeLsum")
NGRAMS = ("distinct", "vocabulary", "unique", "entropy")
DIVERSITY = [f"{name}_{n}" for name in NGRAMS for n in (1, 2, 3)]
DIVERSITY += ["conditional_entropy_2", "conditional_entropy_3", "prediction_length"]


def _same(
    *names: str, idle: Sequence[str] = (), fixed: Mapping[str, Any] = MappingProxyType({}), **keys: tuple[str, Any, Any]
) -> Reader:
    """A reader for these rewards that renames arguments, {RL4LMs' name: (lmgym's name, type, default)}, and adds those
    that are `fixed`."""

    def read(arguments: Section, conversion: Conversion) -> Named:
        arguments.idle(conversion, *idle)
        taken = {**arguments.renamed(**keys), **fixed}
        return {name: dict(taken) for name in names}

    return read


def _learned(arguments: Section, conversion: Conversion) -> Named:
    arguments.idle(conversion, "batch_size")
    settings = {
        "model": arguments.need("model_name", str),
        "label": arguments.need("label_ix", int),
        "with_prompt": arguments.take("include_prompt_for_eval", bool, True),
        "truncation": "left",
    }
    return {"learned_reward": settings}


def _rouge(arguments: Section, conversion: Conversion) -> Named:
    kind = arguments.need("rouge_type", str)
    if kind not in ROUGES:
        raise LmgymError(f"{arguments.key}.rouge_type is '{kind}'; {registry.suggest(kind, ROUGES)}")
    return {kind: _references(arguments)}


def _rouges(arguments: Section, conversion: Conversion) -> Named:
    settings = _references(arguments)
    return {name: dict(settings) for name in ROUGES}


def _references(arguments: Section) -> dict[str, Any]:
    return {"references": "first" if arguments.take("use_single_ref", bool, True) else "best"}


def _rouge_l_max(arguments: Section, conversion: Conversion) -> Named:
    """py-rouge's options: only alpha, stemming and the length limit change ROUGE-L of a single reference."""
    arguments.idle(conversion, "max_n", "apply_avg", "apply_best", "weight_factor", "length_limit_type", "metrics")
    limited, limit = arguments.take("limit_length", bool, True), arguments.take("length_limit", int, 665)
    if limited:
        conversion.warn(f"{arguments.key}.length_limit {limit}: texts are not cut to so many words before ROUGE-L")
    if (alpha := arguments.take("alpha", float, 0.5)) != 0.5:
        conversion.warn(f"{arguments.key}.alpha is {alpha}: ROUGE-L here weighs precision and recall alike (0.5)")
    return {"rouge_l_max": {"stemmer": arguments.take("stemming", bool, True)}}


def _bert_score(arguments: Section, conversion: Conversion) -> Named:
    language = arguments.take("language", str, "en")
    model, layer = BERTS.get(language, MULTILINGUAL)
    return {"bert_score": {"model": model, "layer": layer, "truncation": "right"}}


def _bleurt(arguments: Section, conversion: Conversion) -> Named:
    name = arguments.take("config_name", str) or arguments.take("checkpoint", str) or "bleurt-base-128"
    model = name if "/" in name else f"Elron/{name}"
    conversion.warn(
        f"{arguments.key}: BLEURT's own checkpoints are TensorFlow's; the model read is {model}. Give another by "
        "evaluation.metrics.bleurt.model"
    )
    return {"bleurt": {"model": model, "truncation": "right"}}


def _spider(arguments: Section, conversion: Conversion) -> Named:
    """SPICE and CIDEr. lmgym adds the argument `jar`, since it does not include SPICE."""
    spice, cider = arguments.need("spice_coeff", float), arguments.need("cider_coeff", float)
    if not spice:
        return {"cider": {"weight": cider}} if cider else {}
    jar = arguments.take("jar", str)
    if jar is None:
        raise LmgymError(
            f"the configuration lacks the key '{arguments.key}.jar': SPICE is a Java program, and lmgym brings none "
            "along; give the path of its jar (docs/metrics_reference.md), or spice_coeff: 0"
        )
    return {"spider": {"jar": jar, "spice_coeff": spice, "cider_coeff": cider}}


def _spice(arguments: Section, conversion: Conversion) -> Named:
    if (jar := arguments.take("jar", str)) is not None:
        return {"spice": {"jar": jar}}
    conversion.warn(
        f"{arguments.key.removesuffix('.args')}: SPICE is a Java program, and lmgym brings none along: left out, "
        f"unless {arguments.key}.jar gives its path (docs/metrics_reference.md)"
    )
    return {}


def _intent(arguments: Section, conversion: Conversion) -> Named:
    shaped = arguments.take("shape", bool, True)
    settings = {
        "model": arguments.take("model_name", str, INTENTS),  # RL4LMs names it in its code
        "intent_coeff": arguments.take("intent_coeff", float, 1.0),
        "auto_coeff": arguments.take("auto_coeff", float, 1.0) if shaped else 0.0,
    }
    return {"intent_accuracy": settings}


def _preference(arguments: Section, conversion: Conversion) -> Named:
    arguments.idle(conversion, "device", "batch_size")
    kind = arguments.take("model_type", str, "11b")
    conversion.warn(
        f"{arguments.key}.model_type {kind}: RL4LMs' preference model is a pickle, which lmgym does not read; "
        "concept_coverage replaces it. A model of yours: rewards.common_gen_preference.preference="
        "learned_reward with preference_arguments={model: ..., label: ...}"
    )
    settings = {
        "preference": "concept_coverage",
        "meteor_coefficient": arguments.take("meteor_coeff", float, 0.5),
        "concept_penalty": arguments.take("concept_penalty_coeff", float, 0.5),
    }
    return {"common_gen_preference": settings}


def _diversity(arguments: Section, conversion: Conversion) -> Named:
    window = arguments.take("window_size", int, 100)
    conversion.note(
        "metric diversity -> msttr, distinct, vocabulary, unique, entropy, conditional_entropy and prediction_length, "
        "with marks; those without (GEM's -nopunct) are {reward: distinct_1, punctuation: false} and so on"
    )
    return {"msttr": {"window": window}, **{name: {} for name in DIVERSITY}}


def _entailment(arguments: Section, conversion: Conversion) -> Named:
    arguments.idle(conversion, "imager_load_cache", "device", "granularity", "use_ent")
    model = arguments.take("model_name", str, ENTAILMENT)
    model = model if "/" in model else ENTAILMENT
    conversion.warn(f"{arguments.key}: SummaC reads {model}, sentence by sentence")
    contradiction = arguments.take("use_con", bool, True)
    return {"summac_zero_shot": {"model": model, "contradiction": contradiction, "truncation": "right"}}


def _convolution(arguments: Section, conversion: Conversion) -> Named:
    arguments.rest()
    conversion.warn(
        f"{arguments.key}: summaCConv needs a trained head (in RL4LMs at random, unless start_file names one): left "
        "out. Add evaluation.metrics.summac_conv={model: ..., head: ...}, as docs/learned_rewards.md says"
    )
    return {}


BOTH: dict[str, Reader] = {
    "increasing_numbers": _same("increasing_numbers", min_tokens=("min_tokens", int, None)),
    "learned_reward": _learned,
    "learned_batched_reward": _learned,
    "meteor": _same("meteor"),
    "bleu": _same("bleu"),
    "sacre_bleu": _same(
        "sacre_bleu",
        idle=("force", "use_dynamic_num_threads"),
        use_effective_order=("effective_order", bool, False),
        tokenize=("tokenize", str, None),
        smooth_method=("smooth_method", str, None),
        lowercase=("lowercase", bool, None),
    ),
    "ter": _same("ter", case_sensitive=("case_sensitive", bool, None)),
    "chrf": _same(
        "chrf",
        char_order=("char_order", int, None),
        word_order=("word_order", int, None),
        beta=("beta", float, None),
        lowercase=("lowercase", bool, None),
    ),
    "bert_score": _bert_score,
    "bleurt": _bleurt,
    "rouge_l_max": _rouge_l_max,
}
REWARDS: dict[str, Reader] = BOTH | {
    "sentences_with_dates": _same("dates"),
    "rouge": _rouge,
    "rouge_combined": lambda arguments, conversion: {"rouge_combined": {"references": "first"}},
    "spider": _spider,
    "parent": _same("parent"),
    "common_gen_repeat_penalty": _same("common_gen_repeat_penalty"),
    "common_gen_repeat_penalty_batched": _same("common_gen_repeat_penalty"),
    "intent_accuracy": _intent,
    "common_gen_preference_model": _preference,
}
METRICS: dict[str, Reader] = BOTH | {
    "dates": _same("dates"),
    "rouge": _rouges,
    "cider": _same("cider"),
    "spice": _spice,
    "diversity": _diversity,
    "parent_totto": _same("parent", "parent_overlap", "parent_non_overlap"),
    "bleu_totto": _same("totto_bleu", "totto_bleu_overlap", "totto_bleu_non_overlap"),
    "summaCZS": _entailment,
    "summaCConv": _convolution,
    "intent_accuracy": _same(
        "intent_accuracy", fixed={"intent_coeff": 1.0, "auto_coeff": 0.0}, model_name=("model", str, INTENTS)
    ),
}
