"""Small configurations in RL4LMs' schema, one for each of its tasks and kinds of algorithm, written for these tests."""

import copy
from typing import Any

Tree = dict[str, Any]

CLASSIFIER = {"model_name": "a/classifier", "label_ix": 1}
TASKS: dict[str, Tree] = {  # datapool, reward, metrics
    "imdb": {
        "datapool": {"id": "imdb", "args": {"seed": 4}},
        "reward_fn": {"id": "learned_reward", "args": {**CLASSIFIER, "include_prompt_for_eval": True}},
        "metrics": [
            {"id": "learned_reward", "args": {**CLASSIFIER, "batch_size": 10}},
            {"id": "causal_perplexity", "args": {"tokenizer_id": "gpt2", "stride": 512, "model_type": "causal"}},
            {"id": "diversity", "args": {"window_size": 50}},
        ],
    },
    "commongen": {
        "datapool": {
            "id": "commongen",
            "args": {"prefix": "use: ", "concept_separator_token": ", ", "concept_end_token": "!"},
        },
        "reward_fn": {"id": "meteor", "args": {"shaping_fn": "common_gen_repeat_penalty"}},
        "metrics": [{"id": "rouge"}, {"id": "cider"}, {"id": "bert_score", "args": {"language": "en"}}],
    },
    "cnn_daily_mail": {
        "datapool": {"id": "cnn_daily_mail", "args": {"prompt_prefix": "Sum up: ", "truncate_article": 400}},
        "reward_fn": {"id": "rouge", "args": {"rouge_type": "rouge1", "use_single_ref": False}},
        "metrics": [{"id": "meteor", "args": {}}, {"id": "bleu"}],
    },
    "narrative_qa": {
        "datapool": {"id": "narrative_qa"},
        "reward_fn": {"id": "rouge_l_max", "args": {"alpha": 0.5, "stemming": True, "max_n": 4, "limit_length": True}},
        "metrics": [{"id": "rouge", "args": {"use_single_ref": False}}],
    },
    "iwslt2017": {
        "datapool": {"id": "iwslt2017en_de", "args": {"prompt_prefix": "in German: "}},
        "reward_fn": {"id": "ter"},
        "metrics": [{"id": "sacre_bleu", "args": {"tokenize": "intl"}}, {"id": "chrf", "args": {}}],
    },
    "totto": {
        "datapool": {"id": "totto", "args": {"representation": "subtable"}},
        "reward_fn": {"id": "parent"},
        "metrics": [{"id": "parent_totto", "args": {}}, {"id": "bleu_totto"}],
    },
    "daily_dialog": {
        "datapool": {"id": "daily_dialog", "args": {"context_size": 3}},
        "reward_fn": {"id": "intent_accuracy", "args": {"intent_coeff": 0.75, "auto_coeff": 0.25}},
        "metrics": [{"id": "intent_accuracy"}, {"id": "meteor"}],
    },
    "dummy": {
        "datapool": {"id": "dummy_pool", "args": {"n_samples": 8, "prompt": "Count: 1 2"}},
        "reward_fn": {"id": "increasing_numbers", "args": {"min_tokens": 4}},
        "metrics": [{"id": "increasing_numbers", "args": {"min_tokens": 6}}],
    },
}
ALGORITHMS: dict[str, Tree] = {
    "ppo": {"n_steps": 12, "batch_size": 6, "n_epochs": 2, "clip_range": 0.1, "ent_coef": 0.001, "vf_coef": 0.3},
    "nlpo": {"n_steps": 12, "batch_size": 6, "n_epochs": 2, "gamma": 0.98, "max_grad_norm": 0.4},
    "a2c": {"n_steps": 12, "gae_lambda": 0.9, "rms_prop_eps": 1.0e-6},
    "trpo": {"n_steps": 12, "batch_size": 6, "target_kl": 0.02, "cg_max_steps": 4, "n_critic_updates": 3},
}
MASK = {"top_mask": 0.9, "min_tokens_to_keep": 3, "mask_type": "learned_top_p", "target_update_iterations": 2}


def on_policy(task: str = "dummy", algorithm: str = "ppo", model: str = "builtin:tiny_gpt2", **more: Any) -> Tree:
    """A configuration that samples; `more` are top-level sections in the place of these."""
    given, masked = copy.deepcopy(TASKS[task]), algorithm == "nlpo"
    kind = "seq2seq" if "t5" in model or "bart" in model else "causal"
    return {
        "tokenizer": {"model_name": model, "padding_side": "left", "pad_token_as_eos_token": True},
        "reward_fn": given["reward_fn"],
        "datapool": given["datapool"],
        "env": {
            "n_envs": 2,
            "args": {
                "max_prompt_length": 12,
                "max_episode_length": 6,
                "terminate_on_eos": True,
                "prompt_truncation_side": "right",
                **({"context_start_token": 0} if kind == "seq2seq" else {}),
            },
        },
        "alg": {
            "id": algorithm,
            "args": {"verbose": 1, "learning_rate": 0.0001, "seed": 3, "device": "cpu", **ALGORITHMS[algorithm]},
            "kl_div": {"coeff": 0.02, "target_kl": 2, "norm_reward": False},
            "policy": {
                "id": f"{'maskable_' * masked}{kind}_lm_actor_critic_policy",
                "args": {
                    "model_name": model,
                    "apply_model_parallel": True,
                    "prompt_truncation_side": "right",
                    "generation_kwargs": {"do_sample": True, "top_k": 0, "min_length": 2, "max_new_tokens": 6},
                    **(MASK if masked else {}),
                },
            },
        },
        "train_evaluation": {
            "eval_batch_size": 8,
            "n_iters": 2,
            "eval_every": 1,
            "save_every": 1,
            "metrics": given["metrics"],
            "generation_kwargs": {"num_beams": 2, "length_penalty": 0.6, "min_length": 2, "max_new_tokens": 6},
        },
        **more,
    }


def supervised(task: str = "cnn_daily_mail", model_type: str = "seq2seq", **training: Any) -> Tree:
    """A configuration that imitates references."""
    given = copy.deepcopy(TASKS[task])
    return {
        "tokenizer": {"model_name": "t5-base", "truncation_side": "right", "padding_side": "left", "max_length": 64},
        "datapool": given["datapool"],
        "alg": {
            "id": "supervised",
            "training_args": {
                "per_device_train_batch_size": 16,
                "num_train_epochs": 2,
                "weight_decay": 0.1,
                "lr_scheduler_type": "cosine",
                "learning_rate": 0.0001,
                "logging_steps": 200,
                "save_total_limit": 1,
                **training,
            },
            "model_type": model_type,
            "model_name": "t5-base",
            "generation_kwargs": {"num_beams": 4, "min_length": 5, "max_new_tokens": 20, "post_processing_fn": None},
        },
        "train_evaluation": {"eval_batch_size": 50, "metrics": given["metrics"]},
    }
